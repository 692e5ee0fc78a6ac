//! What operators ask for, done by the node that runs, or beside it when none does.

use crate::config::{self, SiteConfig};
use crate::control::{Answer, BrowseRequest, Request};
use crate::mirrors::{self, Takeover};
use crate::site::Site;
use crate::stores;
use crate::validate::validate;
use farshore_apply::backup::{Backup, Initialised, initialise, is_same_database};
use farshore_apply::browse::{Bound, Browse, Lines, Shown, browse, schedule};
use farshore_apply::requests::{request_resync, request_skip};
use farshore_apply::scheduler::GroupLimits;
use farshore_apply::{ApplyError, Initialise, Subscription, SubscriptionSpec};
use farshore_capture::publication::TableName;
use farshore_capture::taken_out;
use farshore_model::Lsn;
use farshore_monitor::Action;
use farshore_store::LogStore;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// How long a token that was posted on the page is waited for.
const TRACER_ON_PAGE: Duration = Duration::from_secs(20);

/// The store's note that says that a subscription is paused.
fn pause_note(subscription: &str) -> String {
    format!("paused {subscription}")
}

/// Whether a subscription of this store is paused, durably.
pub(crate) fn is_paused(store: &dyn LogStore, subscription: &str) -> bool {
    store.note(&pause_note(subscription)).is_some_and(|note| !note.is_empty())
}

fn set_paused(store: &dyn LogStore, subscription: &str, paused: bool) -> Result<(), String> {
    let note = if paused { "paused" } else { "" };
    if !paused && !is_paused(store, subscription) {
        return Ok(());
    }
    store.set_note(&pause_note(subscription), note).map_err(|error| error.to_string())
}

/// Answers requests of the control socket.
pub(crate) async fn answer(
    site: Arc<Site>,
    request: Request,
    mut lines: Answer,
) -> (Answer, Result<String, String>) {
    let outcome = match request {
        // Folders are looked into, on disks that may hang.
        Request::Status => match tokio::task::spawn_blocking(move || site.report()).await {
            Ok(report) => serde_json::to_string(&report).map_err(|error| error.to_string()),
            Err(_) => Err("looking at the state died".to_owned()),
        },
        Request::Pause { subscription } => site.pause(&subscription).await,
        Request::Resume { subscription, publication } => {
            site.resume(subscription.as_deref(), publication.as_deref()).await
        }
        Request::Skip { subscription, lsn } => site.skip(&subscription, &lsn).await,
        Request::Resync { subscription, table } => {
            site.resync(&subscription, table.as_deref()).await
        }
        Request::Initialise { subscription, lsn, copied_from } => {
            site.initialise(&subscription, lsn.as_deref(), copied_from).await
        }
        Request::Tracer { publication, seconds } => {
            let report = site.tracer(&publication, Duration::from_secs(seconds)).await;
            report.and_then(|report| serde_json::to_string(&report).map_err(|e| e.to_string()))
        }
        Request::ResumeMirror { mirror } => site.resume_mirror(&mirror).await,
        Request::Reserve { mirror, slot } => match site.far_mirror(&mirror) {
            Ok(agent) => agent.reserve(&slot).await.and_then(|reserved| {
                serde_json::to_string(&reserved).map_err(|error| error.to_string())
            }),
            Err(error) => Err(error),
        },
        Request::DropSlot { mirror, slot } => match site.far_mirror(&mirror) {
            Ok(agent) => agent.drop_slot(&slot).await,
            Err(error) => Err(error),
        },
        Request::Promote { mirror, standby, allow_data_loss, instead_of, wait_seconds } => {
            let (standby, instead_of) = (standby.as_deref(), instead_of.as_deref());
            let wanted = Takeover { standby, allow_data_loss, instead_of, wait_seconds };
            match site.far_mirror(&mirror) {
                Ok(agent) => {
                    with_progress(&mut lines, |progress| async move {
                        agent.promote(&wanted, &progress).await
                    })
                    .await
                }
                Err(error) => Err(error),
            }
        }
        Request::Validate { subscription, tables, json } => {
            site.validate(&subscription, &tables, json, &mut lines).await
        }
        Request::Browse(wanted) => {
            match (site.store(&wanted.publication), limits(&site.config, &wanted)) {
                (Ok(store), Ok(limits)) => {
                    let mut to_client = ToClient(&mut lines);
                    list(&store, &wanted, limits, &mut to_client).await
                }
                (Err(error), _) | (_, Err(error)) => Err(error),
            }
        }
    };
    (lines, outcome)
}

/// Does what is asked for on the monitor.
pub(crate) async fn act(site: &Site, action: Action) -> Result<serde_json::Value, String> {
    let said = match action {
        Action::Pause { subscription } => site.pause(&subscription).await,
        Action::Resume { subscription } => site.resume(Some(&subscription), None).await,
        Action::ResumePublication { publication } => site.resume(None, Some(&publication)).await,
        Action::Resync { subscription, table } => site.resync(&subscription, Some(&table)).await,
        Action::Skip { subscription, lsn } => site.skip(&subscription, &lsn).await,
        Action::Tracer { publication } => {
            let report = site.tracer(&publication, TRACER_ON_PAGE).await?;
            return serde_json::to_value(report).map_err(|error| error.to_string());
        }
    };
    said.map(serde_json::Value::String)
}

/// Lines of progress that wait for the client; more are left out.
const PROGRESS_LINES_MAX: usize = 16;

/// Runs work that tells how far it is. A client that goes away does not end it.
async fn with_progress<Fut>(
    lines: &mut Answer,
    work: impl FnOnce(mpsc::Sender<String>) -> Fut,
) -> Result<String, String>
where
    Fut: Future<Output = Result<String, String>>,
{
    let (sender, mut told) = mpsc::channel(PROGRESS_LINES_MAX);
    let mut work = std::pin::pin!(work(sender));
    let mut listens = true;
    loop {
        tokio::select! {
            biased;
            Some(line) = told.recv(), if listens => {
                listens = lines.progress(&line).await.is_ok();
            }
            outcome = &mut work => return outcome,
        }
    }
}

impl Site {
    async fn pause(&self, subscription: &str) -> Result<String, String> {
        let agent = self.subscription(subscription)?;
        agent.switch.pause(|| set_paused(agent.store.as_ref(), subscription, true)).await?;
        tracing::info!(%subscription, "paused");
        Ok(paused_text(subscription))
    }

    async fn resume(
        &self,
        subscription: Option<&str>,
        publication: Option<&str>,
    ) -> Result<String, String> {
        if let Some(subscription) = subscription {
            let agent = self.subscription(subscription)?;
            agent.switch.resume(|| set_paused(agent.store.as_ref(), subscription, false)).await?;
            tracing::info!(%subscription, "resumed");
            return Ok(format!("subscription \"{subscription}\" goes on"));
        }
        let publication = publication.unwrap_or_default();
        let unknown = || self.no_publication(publication);
        let switch = self.log_switch(publication).ok_or_else(unknown)?;
        if let Some(failure) = self.log(publication).and_then(|log| log.failure()) {
            return Err(format!(
                "publication \"{publication}\": its store takes no more ({failure}). Mend that and \
                 restart the node"
            ));
        }
        let accept = || match self.log(publication) {
            Some(log) => taken_out::accept(log.as_ref()).map_err(|error| error.to_string()),
            None => Ok(()),
        };
        switch.resume(accept).await?;
        tracing::info!(%publication, "resumed");
        Ok(format!("publication \"{publication}\" goes on"))
    }

    async fn skip(&self, subscription: &str, lsn: &str) -> Result<String, String> {
        let agent = self.subscription(subscription)?;
        let lsn = parse_lsn(lsn)?;
        // The agent reads what is to be skipped when it starts, and must not pass it meanwhile.
        let held = agent.switch.hold().await;
        let store: Arc<dyn LogStore> = agent.store.clone();
        let text = skip_text(&agent.subscription.spec, &store, lsn).await?;
        held.go_on();
        Ok(text)
    }

    async fn resync(&self, subscription: &str, table: Option<&str>) -> Result<String, String> {
        let agent = self.subscription(subscription)?;
        let table = parse_table(table)?;
        let held = agent.switch.hold().await;
        let text = resync_text(&agent.subscription.spec, table.as_ref()).await?;
        held.go_on();
        Ok(text)
    }

    async fn validate(
        &self,
        subscription: &str,
        tables: &[String],
        json: bool,
        lines: &mut Answer,
    ) -> Result<String, String> {
        let agent = self.subscription(subscription)?;
        let tables: Result<Vec<Option<TableName>>, String> =
            tables.iter().map(|table| parse_table(Some(table))).collect();
        let tables: Vec<TableName> = tables?.into_iter().flatten().collect();
        let not_now = |what: &str| {
            format!(
                "subscription \"{subscription}\" {what}, and tables are compared where it streams: \
                 see farshore status, and farshore resume"
            )
        };
        if agent.switch.is_paused() {
            return Err(not_now("is paused"));
        }
        if let Some(why) = self.log_trouble(&agent.publication) {
            return Err(format!(
                "subscription \"{subscription}\": publication \"{}\" does not stream ({why}), so the \
                 log does not come to where the publisher is now, and tables are compared there: see \
                 farshore status, and farshore resume",
                agent.publication
            ));
        }
        match agent.trouble() {
            Some(trouble) => Err(not_now(&format!("does not stream ({trouble})"))),
            None => validate(&agent.subscription, &tables, json, lines).await,
        }
    }

    async fn initialise(
        &self,
        subscription: &str,
        lsn: Option<&str>,
        copied_from: Option<String>,
    ) -> Result<String, String> {
        let agent = self.subscription(subscription)?;
        let Subscription { spec, source, .. } = agent.subscription.as_ref();
        if spec.initialise != Initialise::Backup {
            return Err(format!(
                "subscription \"{subscription}\" is copied: its section of the site file needs \
                 initialise = \"backup\" before the backup is taken, so that the log is kept for it"
            ));
        }
        let backup = match (lsn.map(parse_lsn).transpose()?, copied_from) {
            (Some(_), Some(_)) => {
                return Err("--lsn and --copied-from: a copy of another subscription's target \
                            tells by itself where it stands; leave --lsn out"
                    .to_owned());
            }
            (Some(lsn), None) => Backup::At(lsn),
            (None, Some(other)) => {
                if let Ok(original) = self.subscription(&other) {
                    check_copy(spec, &original.subscription.spec).await?;
                }
                Backup::CopiedFrom(other)
            }
            (None, None) => Backup::TellsItself,
        };
        let held = agent.switch.hold().await;
        let store: Arc<dyn LogStore> = agent.store.clone();
        let done = initialise(spec, &store, source.as_ref(), &backup).await;
        let done = done.map_err(|error| error.to_string())?;
        agent.subscription.given.reaches(done.lsn);
        held.go_on();
        let Initialised { lsn, proved, tables, left_out, not_followed } = done;
        let proof = if proved { "as the target itself tells" } else { "as given; not verified" };
        let mut text = format!(
            "subscription \"{subscription}\": {tables} tables are on the target as they were at \
             {lsn} ({proof}); it goes on from there"
        );
        if !left_out.is_empty() {
            let names: Vec<String> = left_out.iter().map(ToString::to_string).collect();
            text.push_str(&format!("; to be copied: {}", names.join(", ")));
        }
        if !not_followed.is_empty() {
            let columns: Vec<String> = not_followed.iter().map(ToString::to_string).collect();
            text.push_str(&format!(
                "; columns that are not published stay there as they are, and do not follow: {}",
                columns.join(", ")
            ));
        }
        tracing::info!(%subscription, %lsn, proved, tables, "initialised from a backup");
        Ok(text)
    }

    pub(crate) fn store(&self, publication: &str) -> Result<Arc<dyn LogStore>, String> {
        match self.log(publication) {
            Some(log) => Ok(log),
            None => Err(self.no_publication(publication)),
        }
    }
}

/// Whether the target of `spec` can be a copy of the target of `original`, a subscription of this
/// site, which may be paused just now.
async fn check_copy(spec: &SubscriptionSpec, original: &SubscriptionSpec) -> Result<(), String> {
    let (name, other) = (&spec.name, &original.name);
    let is_same = is_same_database(&spec.target, &original.target).await;
    if is_same.map_err(|error| error.to_string())? {
        return Err(format!(
            "subscription \"{name}\": its target is that of \"{other}\" itself, and no copy of it"
        ));
    }
    if spec.schema.names != original.schema.names {
        return Err(format!(
            "subscription \"{name}\": tables and schemas have other names on the target than with \
             \"{other}\", of which it is a copy. Name them alike in the site file"
        ));
    }
    Ok(())
}

/// The same requests where no node runs. `line` takes the lines of a listing.
///
/// # Errors
/// Why it was refused, for a person.
pub async fn without_node(
    site: &SiteConfig,
    request: &Request,
    line: impl FnMut(&str) -> std::io::Result<()> + Send,
) -> Result<String, String> {
    match request {
        Request::Status => Err("no node runs here".to_owned()),
        Request::Pause { subscription } => {
            let (_, store) = offline(site, subscription)?;
            set_paused(store.as_ref(), subscription, true)?;
            Ok(paused_text(subscription))
        }
        Request::Resume { subscription: Some(subscription), .. } => {
            let (_, store) = offline(site, subscription)?;
            set_paused(store.as_ref(), subscription, false)?;
            Ok(format!("subscription \"{subscription}\" goes on when the node runs"))
        }
        Request::Resume { .. } => {
            Err("no node runs here: a publication goes on when the node starts (farshore run)"
                .to_owned())
        }
        Request::Skip { subscription, lsn } => {
            let lsn = parse_lsn(lsn)?;
            let (spec, store) = offline(site, subscription)?;
            skip_text(&spec, &store, lsn).await
        }
        Request::Resync { subscription, table } => {
            let spec = configured(site, subscription)?.spec.clone();
            let table = parse_table(table.as_deref())?;
            resync_text(&spec, table.as_ref()).await
        }
        Request::ResumeMirror { mirror } => mirrors::resume_without_node(site, mirror),
        Request::DropSlot { .. } => {
            Err("no node runs here: start it (farshore run), which has the spool".to_owned())
        }
        Request::Reserve { .. } | Request::Promote { .. } => Err(
            "no node runs here: start it (farshore run), so that the standby gets what the spool \
             holds"
                .to_owned(),
        ),
        Request::Initialise { .. } => {
            Err("no node runs here: start it (farshore run), so that the log is at hand".to_owned())
        }
        Request::Tracer { .. } => {
            Err("no node runs here, so nothing would carry a token: start it (farshore run)"
                .to_owned())
        }
        Request::Validate { .. } => Err(
            "no node runs here: start it (farshore run); tables are compared where the stream rests \
             for a moment"
                .to_owned(),
        ),
        Request::Browse(wanted) => {
            let store = stores::open_existing(site, &wanted.publication)?;
            let store: Arc<dyn LogStore> = store;
            list(&store, wanted, limits(site, wanted)?, &mut Here(line)).await
        }
    }
}

fn configured<'a>(
    site: &'a SiteConfig,
    subscription: &str,
) -> Result<&'a config::Subscription, String> {
    site.subscriptions
        .iter()
        .find(|s| s.spec.name == subscription)
        .ok_or_else(|| unknown("subscription", subscription))
}

pub(crate) fn unknown(kind: &str, name: &str) -> String {
    format!("the site file has no {kind} \"{name}\"")
}

fn offline(
    site: &SiteConfig,
    subscription: &str,
) -> Result<(SubscriptionSpec, Arc<dyn LogStore>), String> {
    let subscription = configured(site, subscription)?;
    let store = stores::open_existing(site, &subscription.publication)?;
    Ok((subscription.spec.clone(), store))
}

fn paused_text(subscription: &str) -> String {
    format!(
        "subscription \"{subscription}\" is paused, also when the node starts again; its changes \
         are kept for it. To go on: farshore resume"
    )
}

/// What can be asked for by position: the text as typed, if it is one.
///
/// # Errors
/// What is wrong with it.
pub fn typed_lsn(text: &str) -> Result<String, String> {
    let lsn: Lsn = text.parse().map_err(|error| format!("{error}"))?;
    if lsn == Lsn::ZERO { Err("0/0 is no transaction's".to_owned()) } else { Ok(text.to_owned()) }
}

/// What can be asked for by position or time: the text as typed, if it is one of them.
///
/// # Errors
/// What is wrong with it.
pub fn typed_bound(text: &str) -> Result<String, String> {
    text.parse::<Bound>().map(|_| text.to_owned())
}

/// What can be asked for by `schema.table`: the text as typed, if it is that.
///
/// # Errors
/// What is wrong with it.
pub fn typed_table(text: &str) -> Result<String, String> {
    TableName::parse(text).map(|_| text.to_owned())
}

fn parse_lsn(text: &str) -> Result<Lsn, String> {
    typed_lsn(text)
        .and_then(|text| text.parse().map_err(|error| format!("{error}")))
        .map_err(|what| format!("--lsn: {what}"))
}

fn parse_table(text: Option<&str>) -> Result<Option<TableName>, String> {
    text.map(|text| TableName::parse(text).map_err(|what| format!("--table: {what}"))).transpose()
}

async fn skip_text(
    spec: &SubscriptionSpec,
    store: &Arc<dyn LogStore>,
    lsn: Lsn,
) -> Result<String, String> {
    let asked = request_skip(spec, store, lsn).await.map_err(|error| error.to_string())?;
    let when = if asked.is_next { "next" } else { "when it is reached" };
    tracing::info!(subscription = %spec.name, position = %lsn, "to be skipped");
    Ok(format!(
        "subscription \"{}\" (applied up to {}) will leave out the transaction that committed at \
         {lsn} {when}, and record that in farshore.conflicts",
        spec.name, asked.applied
    ))
}

async fn resync_text(spec: &SubscriptionSpec, table: Option<&TableName>) -> Result<String, String> {
    let tables = request_resync(spec, table).await.map_err(|error| error.to_string())?;
    let names: Vec<String> = tables.iter().map(ToString::to_string).collect();
    let names = names.join(", ");
    tracing::info!(subscription = %spec.name, tables = %names, "to be copied anew");
    Ok(format!("subscription \"{}\" empties and copies anew: {names}", spec.name))
}

struct ToClient<'a>(&'a mut Answer);

struct Here<F>(F);

/// A listing that ended early.
pub(crate) struct Ended(pub(crate) String);

impl From<ApplyError> for Ended {
    fn from(error: ApplyError) -> Ended {
        Ended(error.to_string())
    }
}

impl Lines for ToClient<'_> {
    type Error = Ended;

    async fn line(&mut self, line: &str) -> Result<(), Ended> {
        self.0.line(line).await.map_err(|error| Ended(error.to_string()))
    }
}

impl<F: FnMut(&str) -> std::io::Result<()> + Send> Lines for Here<F> {
    type Error = Ended;

    async fn line(&mut self, line: &str) -> Result<(), Ended> {
        (self.0)(line).map_err(|error| Ended(error.to_string()))
    }
}

/// The limits of the subscription whose schedule is wanted, if any is.
fn limits(site: &SiteConfig, wanted: &BrowseRequest) -> Result<Option<GroupLimits>, String> {
    let Some(name) = &wanted.schedule else { return Ok(None) };
    let subscription = configured(site, name)?;
    if subscription.publication != wanted.publication {
        return Err(format!(
            "subscription \"{name}\" follows publication \"{}\", not \"{}\"",
            subscription.publication, wanted.publication
        ));
    }
    Ok(Some(subscription.spec.limits))
}

async fn list<L: Lines<Error = Ended>>(
    store: &Arc<dyn LogStore>,
    wanted: &BrowseRequest,
    limits: Option<GroupLimits>,
    lines: &mut L,
) -> Result<String, String> {
    let bound = |text: &Option<String>, option: &str| {
        let parsed = text.as_deref().map(str::parse::<Bound>).transpose();
        parsed.map_err(|what| format!("{option}: {what}"))
    };
    let wanted = Browse {
        from: bound(&wanted.from, "--from")?,
        to: bound(&wanted.to, "--to")?,
        table: parse_table(wanted.table.as_deref())?,
        limit: wanted.limit,
        json: wanted.json,
    };
    if let Some(limits) = limits {
        let groups = schedule(store, &wanted, limits, lines).await;
        let (groups, more) = groups.map_err(|Ended(error)| error)?;
        let more = if more { "; there are more, see --limit" } else { "" };
        let groups = match groups {
            1 => "1 group".to_owned(),
            groups => format!("{groups} groups"),
        };
        return Ok(format!("{groups}, if the subscription had to catch up{more}"));
    }
    let shown = browse(store, &wanted, lines).await.map_err(|Ended(error)| error)?;
    let Shown { changes, more_at, log_start } = shown;
    let mut text = match changes {
        1 => "1 change".to_owned(),
        changes => format!("{changes} changes"),
    };
    if let Some(more_at) = more_at {
        text.push_str(&format!("; there are more, see --limit and --from {more_at}"));
    }
    if let Some(start) = log_start {
        text.push_str(&format!("; the log begins after {start}, what came before is forgotten"));
    }
    Ok(text)
}
