//! A pair whose publication is at a site of its own, upstream of the one with the subscription.

use crate::{DATABASE, Link, Pair, Site};
use anyhow::{Context, Result, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::wan::Wan;
use std::path::Path;
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// The upstream site's name.
pub const UPSTREAM: &str = "up";
/// The name of the site that has the subscription.
pub const DOWNSTREAM: &str = "t1";

/// The upstream site, the way to it, and the certificates of both.
pub struct Upstream {
    /// The site.
    pub site: Site,
    /// What the downstream site connects to; a line between networks has none.
    pub link: Link,
    /// Where the certificates are.
    pub certificates: TempDir,
    port: ReservedPort,
}

/// Makes certificates of these sites, and an authority if there is none yet.
///
/// # Errors
/// When the verb fails; with its message.
pub fn issue_certificates(folder: &Path, sites: &[&str]) -> Result<()> {
    let made = Command::new(farshore_testkit::process::faults_binary()?)
        .args(["site-cert", "issue", "--dir"])
        .arg(folder)
        .args(sites)
        .stdin(Stdio::null())
        .output()
        .context("run farshore site-cert")?;
    ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Ok(())
}

/// The lines of a site file that say where the certificates are.
pub fn certificate_lines(folder: &Path, site: &str) -> String {
    let at = |name: &str| folder.join(name).display().to_string();
    format!(
        "certificate = \"{}\"\nkey = \"{}\"\nca = \"{}\"\n",
        at(&format!("{site}.crt")),
        at(&format!("{site}.key")),
        at("ca.crt")
    )
}

impl Upstream {
    /// Moves the publications of a pair's site, which must not run, to a site of their own, and
    /// makes its subscriptions follow them over a link.
    ///
    /// # Errors
    /// When farshore does not build, or there is no port.
    pub fn split(pair: &mut Pair) -> Result<Upstream> {
        Upstream::split_across(pair, None)
    }

    /// As [`Upstream::split`], with the upstream site at the near end of a line, where the
    /// publisher must be, and the pair's at the far end, with the subscriber.
    ///
    /// # Errors
    /// As [`Upstream::split`].
    pub fn split_across(pair: &mut Pair, wan: Option<&Wan>) -> Result<Upstream> {
        let certificates = tempfile::Builder::new().prefix("farshore-certificates").tempdir()?;
        issue_certificates(certificates.path(), &[UPSTREAM, DOWNSTREAM])?;
        let port = ReservedPort::new()?;
        let link = Link::to(port.number())?;
        let mut site = Site::named(UPSTREAM)?;
        let publications = pair.site.remove_sections("publication.")?;
        let names: Vec<String> = publications
            .lines()
            .filter_map(|line| line.strip_prefix("[publication.")?.strip_suffix(']'))
            .map(|name| format!("\"{name}\""))
            .collect();
        let mut publications = publications;
        let (mut listen, mut address) =
            ("127.0.0.1".to_owned(), format!("127.0.0.1:{}", link.port()));
        if let Some(wan) = wan {
            let far = pair.site.url_of(&pair.publisher, DATABASE);
            site.place(wan.near());
            pair.site.place(wan.far());
            publications = publications.replace(&far, &site.url_of(&pair.publisher, DATABASE));
            listen = wan.near_address().to_string();
            address = format!("{listen}:{}", port.number());
        }
        site.add_to_site(&format!(
            "listen = \"{listen}:{}\"\n{}",
            port.number(),
            certificate_lines(certificates.path(), UPSTREAM)
        ))?;
        site.add(&publications)?;
        site.add(&format!("[downstream.{DOWNSTREAM}]\npublications = [{}]\n", names.join(", ")))?;
        pair.site.add_to_site(&certificate_lines(certificates.path(), DOWNSTREAM))?;
        pair.site.replace("publication = \"", &format!("publication = \"{UPSTREAM}/"))?;
        pair.site.add(&format!(
            "[upstream.{UPSTREAM}]\naddress = \"{address}\"\nsegment_size = \"64KB\"\n"
        ))?;
        Ok(Upstream { site, link, certificates, port })
    }

    /// The port that the upstream site listens at.
    pub fn port(&self) -> u16 {
        self.port.number()
    }
}
