use super::SnapshotConnection;
use crate::CaptureError;
use crate::publication::PublicationSpec;
use crate::types;

impl SnapshotConnection {
    /// The publisher's own name of the type that `name` means as SQL, without a modifier, if values
    /// may be cast to it for another site: it is built in, and made of values alone. (One that is
    /// shown by name, as `regclass`, would tell of what is not published.)
    pub async fn type_to_cast_to(
        &mut self,
        spec: &PublicationSpec,
        name: &str,
    ) -> Result<Option<String>, CaptureError> {
        let failed = |error| spec.publisher_error(error);
        let sql = &mut self.connection;
        // Before 16, what is no name of a type at all is an error, which would end our transaction.
        sql.simple_query("SAVEPOINT farshore_cast").await.map_err(failed)?;
        let found = sql
            .query(
                "SELECT t.oid, pg_catalog.format_type(t.oid, -1) FROM pg_catalog.pg_type t \
                 WHERE t.oid = pg_catalog.to_regtype($1::text) AND t.typtype IN ('b', 'r', 'm')",
                &[Some(name)],
            )
            .await;
        let rows = match found {
            Ok(rows) => rows,
            Err(error) if error.server_error().is_some_and(|said| !said.is_fatal()) => {
                sql.simple_query("ROLLBACK TO farshore_cast").await.map_err(failed)?;
                return Ok(None);
            }
            // What cannot be sent at all, such as a zero byte.
            Err(farshore_pg::Error::Encode(_)) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        sql.simple_query("RELEASE farshore_cast").await.map_err(failed)?;
        let Some(row) = rows.first() else { return Ok(None) };
        let oid: u32 = row.parse(0).map_err(failed)?;
        Ok(row.get(1).filter(|_| types::is_built_in_value(oid)).map(str::to_owned))
    }
}
