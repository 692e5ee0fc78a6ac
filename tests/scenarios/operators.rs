//! What operators decide and do: conflicts with rows of the target, and the verbs that pause, skip,
//! copy anew and look inside.

#[path = "operators/browse.rs"]
mod browse;
#[path = "operators/conflicts.rs"]
mod conflicts;
#[path = "operators/trouble.rs"]
mod trouble;
#[path = "operators/verbs.rs"]
mod verbs;
