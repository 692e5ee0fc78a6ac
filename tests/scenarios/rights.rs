//! Farshore under roles that have just the rights that the user guide grants them: the SQL comes
//! from `docs/guide.md` itself.

#[path = "rights/foreign_keys.rs"]
mod foreign_keys;
#[path = "rights/guide.rs"]
mod guide;
#[path = "rights/least.rs"]
mod least;
