//! Between sites: authenticated, ordered, checksummed, flow-controlled sessions of messages, each
//! over several TLS 1.3 connections.
//!
//! A [`Dialer`] opens sessions, a [`Listener`] waits for them; from then on both sides are alike: a
//! [`Sender`] and a [`Receiver`] each. A link never looks inside a message. A session that has
//! failed is not mended: open another, and say in its request where to go on.
//!
//! `docs/formats/link.md` draws the bytes.

mod arrivals;
pub mod certificates;
mod crossing;
mod dialer;
mod error;
pub mod frame;
pub mod handshake;
mod heard;
mod identity;
mod listener;
mod meter;
mod opening;
mod options;
mod outgoing;
mod pacer;
mod session;
mod shared;
mod site_name;
mod stripe;
mod trust;
mod turned_away;
mod wire;
mod within;

pub use dialer::Dialer;
pub use error::LinkError;
pub use identity::{Identity, IdentityError, IdentityFiles};
pub use listener::{Incoming, Listener};
pub use meter::{Meter, Traffic};
pub use options::LinkOptions;
pub use pacer::{Bucket, MINUTES_PER_DAY, Pacer, RATE_MIN, Rate, RateWindow, Rates, RatesError};
pub use session::{Receiver, Sender, Session};
pub use site_name::{SITE_NAME_MAX, SITE_URI, check_site_name};
