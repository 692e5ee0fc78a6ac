//! Which server a connection leads to.
//!
//! Each connection goes by the addresses in `source` anew, and a proxy before them decides anew: after
//! a failover one of them may lead to an old primary that nobody has fenced, whose history was not held
//! against the store.

use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_pg::Connection;

/// A run of a server: since when it runs, and on which timeline it writes. A walsender takes such a
/// question too.
const ASK: &str = "SELECT extract(epoch FROM pg_catalog.pg_postmaster_start_time()) || ' ' || \
    CASE WHEN pg_catalog.pg_is_in_recovery() THEN 'recovery' ELSE pg_catalog.substr(\
      pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_flush_lsn()), 1, 8) END";

/// The server that a session of capture looked at before it began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server(String);

impl Server {
    /// The server at the other end of `connection`.
    pub async fn ask(
        spec: &PublicationSpec,
        connection: &mut Connection,
    ) -> Result<Server, CaptureError> {
        let answer = connection.simple_query(ASK).await;
        let answer = answer.map_err(|error| spec.publisher_error(error))?;
        let run = answer.last().and_then(|set| set.rows.first()?.get(0));
        let run = run.ok_or_else(|| {
            CaptureError::Protocol("no answer to since when the publisher runs".to_owned())
        })?;
        Ok(Server(run.to_owned()))
    }

    /// Refuses a connection that leads to another server, or to another run of it: everything is
    /// looked at again then.
    pub async fn check(
        &self,
        spec: &PublicationSpec,
        connection: &mut Connection,
    ) -> Result<(), CaptureError> {
        if Server::ask(spec, connection).await? == *self {
            return Ok(());
        }
        Err(CaptureError::Interrupted(format!(
            "publication \"{}\": {} has led to another server than a moment ago, or to one that was \
             restarted or promoted meanwhile: capture begins again with the one that is there now",
            spec.name,
            spec.source.redacted()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_pg::{Config, Mode};
    use farshore_testkit::postgres::{Cluster, Installation};
    use std::collections::BTreeMap;
    use tokio::runtime::Runtime;

    #[test]
    fn a_walsender_and_a_session_of_one_server_are_told_from_another_ones() {
        let clusters = [15, 18].map(|major| {
            let installation = Installation::find(major).unwrap();
            Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap()
        });
        let [here, elsewhere] = clusters.each_ref().map(|cluster| PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: Vec::new(),
            articles: BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: None,
            adopt_slot: None,
        });
        Runtime::new().unwrap().block_on(async {
            let mut sql = here.connect(Mode::Sql).await.unwrap();
            sql.simple_query("SET timezone = 'Asia/Tokyo'").await.unwrap();
            let server = Server::ask(&here, &mut sql).await.unwrap();
            let mut stream = here.connect(Mode::LogicalReplication).await.unwrap();
            server.check(&here, &mut stream).await.unwrap();
            for mode in [Mode::Sql, Mode::LogicalReplication] {
                let mut other = elsewhere.connect(mode).await.unwrap();
                let found = server.check(&elsewhere, &mut other).await.unwrap_err();
                assert!(found.is_transient(), "{found}");
            }
        });
    }
}
