//! A client of the monitor.

use anyhow::{Context, Result, bail, ensure};
use farshore_tests::Site;
use serde_json::Value;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// A node's start may have to wait for the machine.
const START_MAX: Duration = Duration::from_secs(60);

/// Where a node's monitor is.
#[derive(Clone, Copy, Debug)]
pub struct Monitor {
    pub address: SocketAddr,
    /// The token that it asks for.
    pub token: Option<&'static str>,
}

/// An answer's status and body.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: String,
}

impl Monitor {
    /// Of a node whose site file says port 0.
    pub fn of(site: &Site) -> Result<Monitor> {
        let line = site.await_log("monitor address=", START_MAX)?;
        let (_, address) = line.split_once("address=").context("no address")?;
        Ok(Monitor { address: address.trim().parse()?, token: None })
    }

    fn ask(&self, head: &str, body: &str) -> Result<Answer> {
        let mut stream = self.send(head, body)?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (head, body) = text.split_once("\r\n\r\n").context("no answer")?;
        let status = head.split(' ').nth(1).context("no status")?.parse()?;
        Ok(Answer { status, body: body.to_owned() })
    }

    fn send(&self, head: &str, body: &str) -> Result<TcpStream> {
        let mut stream = TcpStream::connect(self.address)?;
        let (host, length) = (self.address, body.len());
        let token = self.token.map(|token| format!("authorization: Bearer {token}\r\n"));
        let token = token.unwrap_or_default();
        write!(
            stream,
            "{head} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{token}content-type: \
             application/json\r\nx-farshore-action: test\r\ncontent-length: {length}\r\n\r\n{body}"
        )?;
        Ok(stream)
    }

    /// The first of the events.
    pub fn first_event(&self) -> Result<String> {
        let answer = BufReader::new(self.send("GET /api/v1/events", "")?);
        for line in answer.lines() {
            let line = line?;
            if line.starts_with("data: ") {
                return Ok(line);
            }
        }
        bail!("the events ended before the first")
    }

    /// What is at a path, whatever the status.
    pub fn get_any(&self, path: &str) -> Result<Answer> {
        self.ask(&format!("GET {path}"), "")
    }

    /// What is at a path.
    pub fn get(&self, path: &str) -> Result<String> {
        let answer = self.ask(&format!("GET {path}"), "")?;
        ensure!(answer.status == 200, "{path}: {answer:?}");
        Ok(answer.body)
    }

    /// The site's state.
    pub fn status(&self) -> Result<Value> {
        Ok(serde_json::from_str(&self.get("/api/v1/status")?)?)
    }

    /// The value of a metric's series that has this label.
    pub fn metric(&self, name: &str, label: &str) -> Result<f64> {
        let text = self.get("/metrics")?;
        let begins = format!("{name}{{");
        let line = text.lines().find(|line| line.starts_with(&begins) && line.contains(label));
        let line = line.with_context(|| format!("no {name} with {label} in\n{text}"))?;
        Ok(line.rsplit(' ').next().unwrap_or_default().parse()?)
    }

    /// Asks for an action.
    pub fn post(&self, path: &str, body: &str) -> Result<Answer> {
        self.ask(&format!("POST {path}"), body)
    }
}
