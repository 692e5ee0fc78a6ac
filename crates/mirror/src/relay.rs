//! Between the two ends: messages over a link's session, and how log is packed in them.

pub mod compression;
pub mod end;
pub mod message;
pub mod redundancy;
mod tuner;
mod whole_pages;
