//! A mirror between two sites under SIGKILL and power cuts: every commit that a client saw return
//! is on the standby, when the far site is all there is left, and on the server that it becomes.

#[path = "mirror/asynchronous.rs"]
mod asynchronous;
#[path = "mirror/base_backup.rs"]
mod base_backup;
#[path = "mirror/bounds.rs"]
mod bounds;
#[path = "mirror/by_socket.rs"]
mod by_socket;
#[path = "mirror/cascade.rs"]
mod cascade;
#[path = "mirror/costs.rs"]
mod costs;
#[path = "mirror/direct.rs"]
mod direct;
#[path = "mirror/far_sync.rs"]
mod far_sync;
#[path = "mirror/interruptions.rs"]
mod interruptions;
#[path = "mirror/kills.rs"]
mod kills;
#[path = "mirror/mirrored.rs"]
mod mirrored;
#[path = "mirror/namesakes.rs"]
mod namesakes;
#[path = "mirror/promotion.rs"]
mod promotion;
#[path = "mirror/promotion_kills.rs"]
mod promotion_kills;
#[path = "mirror/seeding.rs"]
mod seeding;
#[path = "mirror/serializable.rs"]
mod serializable;
#[path = "mirror/slots.rs"]
mod slots;
