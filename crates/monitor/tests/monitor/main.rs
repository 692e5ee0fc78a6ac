//! The monitor on a site that is made up, asked over HTTP.

mod http;
mod metrics;
mod site;
