//! The monitor on a site that is made up, asked over HTTP.

mod http;
mod many;
mod metrics;
mod site;
