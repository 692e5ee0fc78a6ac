//! What a site file says of the monitor.

use super::{parse_duration, typed};
use farshore_monitor::{Settings, Webhook};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::Duration;

/// Key of `[site]` and what is wrong with it.
type Wrong = (&'static str, String);

/// Resolves `monitor` and what belongs to it; nothing when the site has no monitor.
pub(super) fn resolve(folder: &Path, site: &typed::Site) -> Result<Option<Settings>, Wrong> {
    let tls = match (&site.monitor_certificate, &site.monitor_key) {
        (Some(certificate), Some(key)) => Some((folder.join(certificate), folder.join(key))),
        (None, None) => None,
        (Some(_), None) => return Err(alone("monitor_certificate", "monitor_key")),
        (None, Some(_)) => return Err(alone("monitor_key", "monitor_certificate")),
    };
    let token = site.monitor_token.as_ref().map(|path| folder.join(path));
    let Some(text) = &site.monitor else {
        if tls.is_some() || token.is_some() || site.webhook.is_some() {
            let given = "monitor_token, monitor_certificate, monitor_key or webhook";
            return Err(alone(given, "monitor"));
        }
        return Ok(None);
    };
    let address = address(text).map_err(|what| ("[site] monitor", what))?;
    let history = Some(folder.join(&site.data_dir).join("monitor"));
    let webhook = site.webhook.as_deref().map(Webhook::parse).transpose();
    let webhook = webhook.map_err(|what| ("[site]", format!("webhook {what}")))?;
    let settings = Settings { address, token, tls, history, webhook };
    settings.check().map_err(|what| ("[site] monitor", what))?;
    Ok(Some(settings))
}

/// How often tracer tokens are posted; never when absent.
pub(super) fn tracer_every(site: &typed::Site) -> Result<Option<Duration>, Wrong> {
    let Some(text) = &site.tracer_every else { return Ok(None) };
    if site.monitor.is_none() {
        return Err(alone("tracer_every", "monitor"));
    }
    match parse_duration(text) {
        Ok(every) if !every.is_zero() => Ok(Some(every)),
        _ => Err(("[site] tracer_every", format!("\"{text}\" is not a time such as 10s or 1min"))),
    }
}

fn alone(given: &str, missing: &str) -> Wrong {
    ("[site]", format!("{given} without {missing}: name it too, or leave both out"))
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let local = text.strip_prefix("localhost:").and_then(|port| port.parse().ok());
    if let Some(port) = local {
        return Ok(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    }
    text.parse().map_err(|_| {
        format!("\"{text}\" is not an address with a port, such as 127.0.0.1:7480 or [::1]:7480")
    })
}
