//! One standby's session, from its first byte on.

mod backup;
mod messages;
mod streaming;

use super::Context;
use super::access::{Guest, refuse};
use super::scram::Denied;
use crate::keep::blocking;
use crate::spool::{Closed, SlotName, Spool, SpoolError, TemporarySlot};
use crate::wal::{Timeline, history_file_name};
use bytes::{Buf, BytesMut};
use farshore_model::Lsn;
use farshore_wire::replication::ReplicationError;
use farshore_wire::replication_command::{CommandError, ReplicationCommand};
use farshore_wire::server::{self, ClientError, FromFrontend, type_oid};
use messages::Messages;
pub(super) use messages::Reader;
use socket2::{SockRef, TcpKeepalive};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;

/// A client has so long to say who it is, and to show it.
const STARTUP_WITHIN: Duration = Duration::from_secs(20);
/// A peer that is silent for so long is asked by TCP whether it is there, and then so often. A
/// client between two commands may be silent for as long as it likes.
const KEEPALIVE: (Duration, Duration, u32) = (DEAD_AFTER, KEEPALIVE_EVERY, 3);
/// A standby that takes nothing, or says nothing, for so long is gone.
const DEAD_AFTER: Duration = Duration::from_secs(60);
/// Saying goodbye takes no longer.
const SHUTDOWN_WITHIN: Duration = Duration::from_secs(1);
/// It is asked for a sign of life so often.
const KEEPALIVE_EVERY: Duration = Duration::from_secs(10);

/// Why a session ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    #[error("{0}")]
    Client(#[from] ClientError),
    #[error("{0}")]
    Replication(#[from] ReplicationError),
    #[error("{0}")]
    Encode(#[from] farshore_wire::frontend::EncodeError),
    #[error("{0}")]
    Spool(#[from] SpoolError),
    #[error("it was turned away: {0}")]
    TurnedAway(String),
    #[error("{0}")]
    Denied(#[from] Denied),
    #[error("nothing was heard from it for {DEAD_AFTER:?}")]
    Silent,
    #[error("it left while a base backup came")]
    Left,
    #[error("it sent {0} where that has no place")]
    OutOfPlace(&'static str),
}

/// An error that the client is told; the session goes on.
pub(super) struct Refusal {
    pub sqlstate: &'static str,
    pub message: String,
    pub hint: Option<String>,
}

impl Refusal {
    pub fn new(sqlstate: &'static str, message: impl Into<String>) -> Refusal {
        Refusal { sqlstate, message: message.into(), hint: None }
    }

    pub fn hint(mut self, hint: &str) -> Refusal {
        self.hint = Some(hint.to_owned());
        self
    }
}

/// What a command came to.
enum Done {
    Answered,
    Refused(Refusal),
}

/// Serves one connection until its end.
pub(super) async fn serve(
    socket: TcpStream,
    peer: SocketAddr,
    context: Context,
    knocking: OwnedSemaphorePermit,
) -> Result<(), SessionError> {
    socket.set_nodelay(true)?;
    let (time, interval, retries) = KEEPALIVE;
    let keepalive = TcpKeepalive::new().with_time(time).with_interval(interval);
    SockRef::from(&socket).set_tcp_keepalive(&keepalive.with_retries(retries))?;
    let admitted = timeout(STARTUP_WITHIN, context.door.admit(socket, peer)).await;
    let Some(guest) = admitted.map_err(|_| SessionError::Silent)?? else { return Ok(()) };
    drop(knocking);
    let Guest { reader, mut writer, buffer, parameters, mut out } = guest;
    let Ok(_permit) = context.sessions.clone().try_acquire_owned() else {
        let message = format!("mirror \"{}\" has as many sessions as it serves", context.mirror);
        return Err(refuse(&mut writer, &mut out, Refusal::new("53300", message)).await);
    };
    let named = |name: &str| {
        let found = parameters.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    };
    // It is shown on terminals.
    let application_name = for_log(named("application_name").unwrap_or("standby"));
    let wants_replication = named("replication")
        .is_some_and(|value| matches!(value, "true" | "on" | "yes" | "1" | "t"));
    if !wants_replication {
        let message = format!("mirror \"{}\" serves physical replication only", context.mirror);
        let refusal = Refusal::new("0A000", message).hint(
            "Connect as a standby or pg_receivewal does (replication=true); query the standby.",
        );
        return Err(refuse(&mut writer, &mut out, refusal).await);
    }
    let spool = context.spool.borrow().clone();
    let Some(spool) = spool else {
        let message = format!("mirror \"{}\" has received no log yet", context.mirror);
        let refusal =
            Refusal::new("57P03", message).hint("Try again once its near end is connected.");
        return Err(refuse(&mut writer, &mut out, refusal).await);
    };
    let version = version_text(spool.identity().server_version);
    for (name, value) in [
        ("server_version", version.as_str()),
        ("server_encoding", "UTF8"),
        ("client_encoding", named("client_encoding").unwrap_or("UTF8")),
        ("application_name", &application_name),
        ("integer_datetimes", "on"),
        ("standard_conforming_strings", "on"),
        ("DateStyle", "ISO, MDY"),
        ("IntervalStyle", "postgres"),
        ("TimeZone", "UTC"),
        ("is_superuser", "off"),
        ("session_authorization", named("user").unwrap_or_default()),
    ] {
        server::parameter_status(&mut out, name, value);
    }
    server::backend_key_data(&mut out, std::process::id() as i32, 0);
    server::ready_for_query(&mut out);
    write(&mut writer, &mut out).await?;
    let mut session = Session {
        peer,
        application_name,
        context,
        spool,
        messages: Messages::begin(reader, buffer),
        writer,
        out,
        temporary_slots: Vec::new(),
    };
    let ended = session.run().await;
    say_goodbye(&mut session.writer).await;
    ended
}

/// TLS says that it ends. Whoever does not take that is not waited for.
pub(super) async fn say_goodbye(to: &mut (impl AsyncWrite + Unpin)) {
    let _ = timeout(SHUTDOWN_WITHIN, to.shutdown()).await;
}

/// `15.18` for 150018, as `server_version` is shown.
fn version_text(number: u32) -> String {
    format!("{}.{}", number / 10_000, number % 10_000)
}

/// Writes all of `out`, and empties it.
pub(super) async fn write(
    to: &mut (impl AsyncWrite + Unpin),
    out: &mut BytesMut,
) -> Result<(), SessionError> {
    write_with(to, out, &[]).await
}

/// Writes all of `out`, and empties it, and what is `behind` it.
async fn write_with(
    to: &mut (impl AsyncWrite + Unpin),
    out: &mut BytesMut,
    behind: &[u8],
) -> Result<(), SessionError> {
    let written = async {
        to.write_all_buf(&mut Buf::chain(&out[..], behind)).await?;
        // TLS may hold back what the socket did not take at once.
        to.flush().await
    };
    timeout(DEAD_AFTER, written).await.map_err(|_| SessionError::Silent)??;
    out.clear();
    Ok(())
}

struct Session {
    peer: SocketAddr,
    application_name: String,
    context: Context,
    spool: Arc<Spool>,
    messages: Messages,
    writer: Box<dyn AsyncWrite + Send + Unpin>,
    out: BytesMut,
    /// Dropped with the session, however it ends.
    temporary_slots: Vec<TemporarySlot>,
}

impl Session {
    async fn run(&mut self) -> Result<(), SessionError> {
        loop {
            let Some(message) = self.messages.next().await? else { return Ok(()) };
            let text = match message {
                FromFrontend::Query(text) => text,
                FromFrontend::Terminate => return Ok(()),
                // What was on its way when a stream ended.
                FromFrontend::CopyData(_) | FromFrontend::CopyDone | FromFrontend::CopyFail(_) => {
                    continue;
                }
            };
            let parsed = ReplicationCommand::parse(&text);
            let is_to_stream = matches!(parsed, Ok(ReplicationCommand::StartPhysical { .. }));
            let done = match parsed {
                Ok(command) => self.answer(command).await?,
                Err(CommandError::Syntax(what)) => Done::Refused(Refusal::new("42601", what)),
                Err(CommandError::Unsupported(what)) => Done::Refused(Refusal::new("0A000", what)),
            };
            if let Done::Refused(refusal) = done {
                tracing::info!(
                    mirror = %self.context.mirror, standby = %for_log(&self.application_name),
                    "refused \"{}\": {}", for_log(&text), for_log(&refusal.message)
                );
                let (code, hint) = (refusal.sqlstate, refusal.hint.as_deref());
                // No log, no slot, a slot that is lost: what does not pass by itself.
                if is_to_stream && ["58P01", "42704", "55000"].contains(&code) {
                    let name = for_log(&self.application_name);
                    let help = match (code, hint) {
                        ("58P01", _) => ". Seed it anew",
                        (_, Some(hint)) => &format!(". {}", hint.trim_end_matches('.')),
                        (_, None) => "",
                    };
                    let why = format!("{}{help}", for_log(&refusal.message));
                    self.context.standbys.refuse(&name, self.peer, &why);
                }
                server::error_response(&mut self.out, "ERROR", code, &refusal.message, hint);
            }
            server::ready_for_query(&mut self.out);
            write(&mut self.writer, &mut self.out).await?;
        }
    }

    async fn answer(&mut self, command: ReplicationCommand) -> Result<Done, SessionError> {
        let positions = *self.spool.positions().borrow();
        match command {
            ReplicationCommand::IdentifySystem => {
                let system_id = self.spool.identity().system_id.to_string();
                let (timeline, at) =
                    (positions.timeline.to_string(), positions.durable.to_string());
                let columns = [
                    ("systemid", type_oid::TEXT),
                    ("timeline", type_oid::INT8),
                    ("xlogpos", type_oid::TEXT),
                    ("dbname", type_oid::TEXT),
                ];
                let values = [Some(system_id.as_str()), Some(&timeline), Some(&at), None];
                self.row(&columns, &values, "IDENTIFY_SYSTEM");
                Ok(Done::Answered)
            }
            ReplicationCommand::Show(name) => Ok(self.show(&name)),
            ReplicationCommand::TimelineHistory(timeline) => {
                self.timeline_history(Timeline(timeline)).await
            }
            ReplicationCommand::CreatePhysicalSlot { name, temporary, reserve_wal } => {
                self.create_slot(&name, temporary, reserve_wal, positions.durable).await
            }
            ReplicationCommand::ReadSlot(name) => {
                let known = SlotName::new(&name).and_then(|name| self.spool.slot(&name));
                let restart = known.flatten();
                let timeline = match restart {
                    // As a server has it: pg_receivewal asks for log from there on this timeline,
                    // and names files by it.
                    Some(restart) => {
                        let (spool, own) = (self.spool.clone(), positions.timeline);
                        let history = blocking(move || spool.history(own)).await?;
                        Some(history.timeline_at(own, restart).to_string())
                    }
                    None => None,
                };
                let restart = restart.map(|restart| restart.to_string());
                let columns = [
                    ("slot_type", type_oid::TEXT),
                    ("restart_lsn", type_oid::TEXT),
                    ("restart_tli", type_oid::INT8),
                ];
                let values = [known.map(|_| "physical"), restart.as_deref(), timeline.as_deref()];
                self.row(&columns, &values, "READ_REPLICATION_SLOT");
                Ok(Done::Answered)
            }
            ReplicationCommand::DropSlot(name) => {
                let Some(slot) = SlotName::new(&name) else { return Ok(no_slot(&name)) };
                if self.context.standbys.is_in_use(&slot) {
                    return Ok(in_use(&name));
                }
                let spool = self.spool.clone();
                if !blocking(move || spool.drop_slot(&slot)).await? {
                    return Ok(no_slot(&name));
                }
                server::command_complete(&mut self.out, "DROP_REPLICATION_SLOT");
                Ok(Done::Answered)
            }
            ReplicationCommand::BaseBackup(options) => self.base_backup(&options).await,
            ReplicationCommand::StartPhysical { slot, start, timeline } => {
                let timeline = timeline.map_or(positions.timeline, Timeline);
                self.stream(slot, start, timeline).await
            }
        }
    }

    fn row(&mut self, columns: &[(&str, u32)], values: &[Option<&str>], tag: &str) {
        let values: Vec<_> = values.iter().map(|value| value.map(str::as_bytes)).collect();
        server::row_description(&mut self.out, columns);
        server::data_row(&mut self.out, &values);
        server::command_complete(&mut self.out, tag);
    }

    fn show(&mut self, name: &str) -> Done {
        let identity = self.spool.identity();
        let value = match name.to_ascii_lowercase().as_str() {
            "wal_segment_size" => match identity.segment.get() >> 20 {
                1_024 => "1GB".to_owned(),
                megabytes => format!("{megabytes}MB"),
            },
            "data_directory_mode" => "0700".to_owned(),
            "server_version" => version_text(identity.server_version),
            "server_version_num" => identity.server_version.to_string(),
            "integer_datetimes" => "on".to_owned(),
            _ => {
                let message = format!("unrecognized configuration parameter \"{name}\"");
                return Done::Refused(Refusal::new("42704", message));
            }
        };
        self.row(&[(name, type_oid::TEXT)], &[Some(&value)], "SHOW");
        Done::Answered
    }

    async fn timeline_history(&mut self, timeline: Timeline) -> Result<Done, SessionError> {
        let spool = self.spool.clone();
        let name = history_file_name(timeline);
        let Some(text) = blocking(move || spool.history_text(timeline)).await? else {
            let message = format!("could not open file \"pg_wal/{name}\": it is not in the spool");
            return Ok(Done::Refused(Refusal::new("58P01", message)));
        };
        let columns = [("filename", type_oid::TEXT), ("content", type_oid::BYTEA)];
        self.row(&columns, &[Some(&name), Some(&text)], "TIMELINE_HISTORY");
        Ok(Done::Answered)
    }

    async fn create_slot(
        &mut self,
        name: &str,
        temporary: bool,
        reserve_wal: bool,
        durable: Lsn,
    ) -> Result<Done, SessionError> {
        let Some(slot) = SlotName::new(name) else {
            let message = format!("replication slot name \"{name}\" is not valid");
            return Ok(Done::Refused(
                Refusal::new("42602", message)
                    .hint("Use 1 to 63 lower-case letters, digits and underscores."),
            ));
        };
        let restart = reserve_wal.then(|| self.spool.identity().segment.floor(durable));
        let is_made = if temporary {
            let made = self.spool.create_temporary_slot(&slot, restart);
            let is_made = made.is_some();
            self.temporary_slots.extend(made);
            is_made
        } else {
            let spool = self.spool.clone();
            blocking(move || spool.create_slot(&slot, restart)).await?
        };
        if !is_made {
            let message = format!("replication slot \"{name}\" already exists");
            return Ok(Done::Refused(Refusal::new("42710", message)));
        }
        let columns = [
            ("slot_name", type_oid::TEXT),
            ("consistent_point", type_oid::TEXT),
            ("snapshot_name", type_oid::TEXT),
            ("output_plugin", type_oid::TEXT),
        ];
        let values = [Some(name), Some("0/0"), None, None];
        self.row(&columns, &values, "CREATE_REPLICATION_SLOT");
        Ok(Done::Answered)
    }
}

/// What a client of a spool that was closed is told, once it has everything.
fn was_promoted(closed: &Closed) -> Done {
    let Closed { timeline, end, server } = closed;
    let message = format!(
        "this mirror has no more log than up to {end} on timeline {timeline}: {server} was promoted \
         from it, or is about to be"
    );
    Done::Refused(Refusal::new("55000", message).hint(
        "Point primary_conninfo, or of another mirror its principal, to the server that was promoted, \
         with a primary_slot_name that it has, or none; or seed the standby anew.",
    ))
}

fn in_use(name: &str) -> Done {
    let message = format!("replication slot \"{name}\" is active");
    Done::Refused(Refusal::new("55006", message))
}

/// What a client sent, for the log: one line that forges no other.
fn for_log(text: &str) -> String {
    const CHARS_MAX: usize = 200;
    let cut = if text.chars().nth(CHARS_MAX).is_some() { "…" } else { "" };
    text.chars().take(CHARS_MAX).flat_map(char::escape_debug).chain(cut.chars()).collect()
}

fn no_slot(name: &str) -> Done {
    let message = format!("replication slot \"{name}\" does not exist");
    Done::Refused(Refusal::new("42704", message).hint(
        "Make it with pg_receivewal --create-slot against this address, or leave \
         primary_slot_name empty.",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_client_sent_is_one_short_line_in_the_log() {
        assert_eq!(for_log("DROP \"a\"\nERROR \u{1b}[2J"), "DROP \\\"a\\\"\\nERROR \\u{1b}[2J");
        let long = for_log(&"é".repeat(5_000));
        assert_eq!(long.chars().count(), 201);
    }
}
