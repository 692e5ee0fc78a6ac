//! Who on the target keeps a subscription waiting: a session that holds a lock may do so for hours,
//! or a server hang, and nothing fails meanwhile.

use crate::postgres::session::Session;
use crate::status::Phase;
use crate::subscription::Subscription;
use farshore_model::Lsn;
use std::convert::Infallible;
use std::time::Duration;
use tokio::time::Instant;

/// A transaction that is at work for longer than two looks is asked about.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Who cannot be asked within this is asked again.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// A transaction that a target has not finished for so long is told of, whatever the reason.
const SLOW_AFTER: Duration = Duration::from_secs(60);

/// Sessions that our own wait for, but for our own; and prepared transactions that hold what they wait
/// for, which no session has (PostgreSQL docs: 54.12. `pg_locks`): among who blocks they are process 0
/// (9.27. System Information Functions, `pg_blocking_pids`).
const HOLDERS: &str = "WITH session AS ( \
     SELECT *, application_name = pg_catalog.left($1, 63) \
       OR pg_catalog.starts_with(application_name, $1 || ' ') AS is_ours \
     FROM pg_catalog.pg_stat_activity) \
     SELECT string_agg(DISTINCT holder, ', ') FROM (SELECT pg_catalog.format('process %s of %s (%s%s)', \
     b.pid, b.usename, coalesce(nullif(b.application_name, ''), b.backend_type, 'not shown to this role'), \
     coalesce(', ' || b.state || ' since ' || pg_catalog.date_trunc('second', b.state_change), '')) \
     FROM session a \
     CROSS JOIN LATERAL pg_catalog.unnest(pg_catalog.pg_blocking_pids(a.pid)) AS p (pid) \
     JOIN session b ON b.pid = p.pid \
     WHERE a.is_ours AND a.wait_event_type = 'Lock' AND NOT b.is_ours \
     UNION ALL SELECT pg_catalog.format('a prepared transaction, %L of %s since %s (COMMIT PREPARED or \
     ROLLBACK PREPARED ends it)', x.gid, x.owner, pg_catalog.date_trunc('second', x.prepared)) \
     FROM pg_catalog.pg_prepared_xacts x JOIN pg_catalog.pg_locks own \
       ON own.transactionid = x.transaction AND own.granted AND own.pid IS NULL \
     WHERE EXISTS (SELECT FROM session a \
     JOIN pg_catalog.pg_locks w ON w.pid = a.pid AND NOT w.granted \
     JOIN pg_catalog.pg_locks h ON h.granted AND h.pid IS NULL \
       AND h.virtualtransaction = own.virtualtransaction \
       AND (h.locktype, h.database, h.relation, h.page, h.tuple, h.transactionid, h.classid, h.objid) \
       IS NOT DISTINCT FROM \
       (w.locktype, w.database, w.relation, w.page, w.tuple, w.transactionid, w.classid, w.objid) \
     WHERE a.is_ours AND 0 = ANY (pg_catalog.pg_blocking_pids(a.pid)))) AS found (holder)";

/// The oldest transaction that is not finished, as it was seen first.
#[derive(Default)]
struct Pending {
    seen: Option<(Lsn, Instant)>,
}

impl Pending {
    /// For how long it has been the same one; `None` if it was not the last time.
    fn look(&mut self, oldest: Option<Lsn>, now: Instant) -> Option<Duration> {
        match (self.seen, oldest) {
            (Some((position, since)), Some(oldest)) if position == oldest => Some(now - since),
            (_, oldest) => {
                self.seen = oldest.map(|oldest| (oldest, now));
                None
            }
        }
    }
}

impl Subscription {
    /// Looks again and again, and says what it finds in the status.
    pub(crate) async fn watch_for_holders(&self) -> Infallible {
        let mut pending = Pending::default();
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let (oldest, streams) = {
                let status = self.lock_status();
                // A start and a copy have no position that moves.
                let works =
                    matches!(status.phase, Phase::Starting | Phase::Copying | Phase::CatchingUp);
                let pending = status.oldest_pending.map(|pending| pending.position);
                let streams = status.phase == Phase::Streaming;
                (pending.or(works.then_some(Lsn::ZERO)), streams)
            };
            let pending_for = pending.look(oldest, Instant::now());
            let holders = match pending_for {
                Some(_) => self.holders().await,
                None => None,
            };
            let waits_for = match holders {
                Some(holders) => Some(format!(
                    "waiting for a lock on the target that another session holds: {holders}"
                )),
                None if streams && pending_for.is_some_and(|time| time >= SLOW_AFTER) => {
                    Some(format!(
                        "the target has not finished a transaction for more than {SLOW_AFTER:?}: one \
                         that changes many rows takes that long, or a server or disk that hangs \
                         (pg_stat_activity there shows what \"{}\" does)",
                        self.spec.application_name()
                    ))
                }
                None => None,
            };
            if waits_for.is_some() && self.lock_status().waits_for != waits_for {
                tracing::warn!(
                    subscription = %self.spec.name, "{}", waits_for.as_deref().unwrap_or_default()
                );
            }
            self.set_status(|status| status.waits_for = waits_for);
        }
    }

    async fn holders(&self) -> Option<String> {
        let own = self.spec.application_name();
        let name = format!("{own} looks for locks");
        let asked = async {
            // One that limits of the role do not cut off.
            let mut session = Session::connect(&self.spec.target, &name).await.ok()?;
            let found = session.query(HOLDERS, &[Some(&own)]).await.ok();
            session.connection.close().await;
            found?.first()?.get(0).map(str::to_owned)
        };
        tokio::time::timeout(ASK_WITHIN, asked).await.ok().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_pending_since_it_was_the_oldest() {
        let (mut pending, began) = (Pending::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut look = |oldest: Option<u64>, seconds| {
            pending.look(oldest.map(Lsn), at(seconds)).map(|time| time.as_secs())
        };
        assert_eq!(look(None, 0), None);
        assert_eq!(look(Some(7), 5), None);
        assert_eq!(look(Some(7), 10), Some(5));
        assert_eq!(look(Some(7), 65), Some(60));
        assert_eq!(look(Some(8), 70), None);
        assert_eq!(look(Some(8), 75), Some(5));
        assert_eq!(look(None, 80), None);
        assert_eq!(look(Some(8), 85), None);
    }
}
