//! Who on the target keeps a subscription waiting: a session that holds a lock may do so for hours,
//! and nothing fails meanwhile.

use crate::status::Phase;
use crate::subscription::Subscription;
use farshore_model::Lsn;
use farshore_pg::{Connection, Mode};
use std::convert::Infallible;
use std::time::Duration;

/// A transaction that is at work for longer than two looks is asked about.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Who cannot be asked within this is asked again.
const ASK_WITHIN: Duration = Duration::from_secs(5);

/// Sessions that our own wait for, but for our own; and prepared transactions that hold what they wait
/// for, which no session has (PostgreSQL docs: 54.12. `pg_locks`): among who blocks they are process 0
/// (9.27. System Information Functions, `pg_blocking_pids`).
const HOLDERS: &str = "WITH session AS ( \
     SELECT *, application_name = pg_catalog.left($1, 63) \
       OR pg_catalog.starts_with(application_name, $1 || ' ') AS is_ours \
     FROM pg_catalog.pg_stat_activity) \
     SELECT string_agg(DISTINCT holder, ', ') FROM (SELECT pg_catalog.format('process %s of %s (%s%s)', \
     b.pid, b.usename, coalesce(nullif(b.application_name, ''), b.backend_type), \
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

impl Subscription {
    /// Looks again and again, and says what it finds in the status.
    pub(crate) async fn watch_for_holders(&self) -> Infallible {
        let mut before = None;
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = {
                let status = self.lock_status();
                // A start and a copy have no position that moves.
                let works =
                    matches!(status.phase, Phase::Starting | Phase::Copying | Phase::CatchingUp);
                let pending = status.oldest_pending.map(|pending| pending.position);
                pending.or(works.then_some(Lsn::ZERO))
            };
            let is_held = now.is_some() && now == before;
            before = now;
            let holders = if is_held { self.holders().await } else { None };
            let waits_for = holders.map(|holders| {
                format!("waiting for a lock on the target that another session holds: {holders}")
            });
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
        let target =
            self.spec.target.clone().with_application_name(&format!("{own} looks for locks"));
        let asked = async {
            let mut connection = Connection::connect(&target, Mode::Sql).await.ok()?;
            let found = connection.query(HOLDERS, &[Some(&own)]).await.ok();
            connection.close().await;
            found?.first()?.get(0).map(str::to_owned)
        };
        tokio::time::timeout(ASK_WITHIN, asked).await.ok().flatten()
    }
}
