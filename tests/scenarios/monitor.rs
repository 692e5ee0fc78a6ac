//! The monitor of a site at work: what it says against what the databases hold.

#[path = "monitor/asking.rs"]
mod asking;
#[path = "monitor/browser.rs"]
mod browser;
#[path = "monitor/browser_sites.rs"]
mod browser_sites;
#[path = "monitor/legs.rs"]
mod legs;
#[path = "monitor/secrets.rs"]
mod secrets;
#[path = "monitor/site.rs"]
mod site;
#[path = "monitor/sites.rs"]
mod sites;
#[path = "monitor/tracers.rs"]
mod tracers;
