//! Waiting for transactions that are running on the publisher, with a word on which.
//!
//! The creation of a logical slot, and of a snapshot, waits until every transaction that was running
//! when it began has ended, in whatever database (PostgreSQL docs: "47.2.5. Exported Snapshots").
//! One that somebody left open, or prepared and forgot, would hold it up for good without a sign.

use crate::CaptureError;
use crate::publication::PublicationSpec;
use std::pin::pin;
use std::time::Duration;

/// What takes no longer is worth no word.
const FIRST_LOOK: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// The oldest first. Our own sessions do not write while a slot is made.
const RUNNING: &str = "SELECT string_agg(who, ', ' ORDER BY since) FROM (\
     SELECT * FROM (\
     SELECT pg_catalog.format('prepared transaction %L in database %I (COMMIT PREPARED or ROLLBACK \
       PREPARED ends it)', gid, database) AS who, prepared AS since FROM pg_catalog.pg_prepared_xacts \
     UNION ALL \
     SELECT pg_catalog.format('process %s of %s in database %I (%s)', pid, usename, datname, \
       coalesce(nullif(application_name, ''), state)), xact_start FROM pg_catalog.pg_stat_activity \
     WHERE backend_xid IS NOT NULL AND pid <> pg_catalog.pg_backend_pid()) AS running \
     WHERE since < now() - interval '2 s' ORDER BY since LIMIT 3) AS oldest";

/// Does `work`, which waits for running transactions, and tells after a while which they are; `None`
/// when that is over.
pub(crate) async fn patiently<T>(
    spec: &PublicationSpec,
    work: impl Future<Output = T>,
    tell: impl Fn(Option<String>),
) -> T {
    let mut work = pin!(work);
    let (mut pause, mut told) = (FIRST_LOOK, None);
    loop {
        let look = async {
            tokio::time::sleep(pause).await;
            running(spec).await
        };
        let running = tokio::select! {
            done = &mut work => {
                tell(None);
                return done;
            }
            running = look => running,
        };
        pause = LOOK_EVERY;
        // Who cannot be asked now is asked again.
        let Ok(Some(running)) = running else { continue };
        let why = format!(
            "waiting for transactions that are running on {}: {running}",
            spec.source.redacted()
        );
        if told.as_ref() != Some(&why) {
            tracing::warn!(publication = %spec.name, "{why}");
            tell(Some(why.clone()));
            told = Some(why);
        }
    }
}

async fn running(spec: &PublicationSpec) -> Result<Option<String>, CaptureError> {
    let mut sql = spec.connect_to_ask().await?;
    let rows = sql.query(RUNNING, &[]).await.map_err(|error| spec.publisher_error(error))?;
    sql.close().await;
    Ok(rows.first().and_then(|row| row.get(0)).map(str::to_owned))
}
