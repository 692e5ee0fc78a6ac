//! Two servers side by side.

use super::Findings;
use super::server::Server;
use farshore_capture::publication::TableName;

/// Looks at what holds only of a pair. `onto_itself` is a published table that would be written, if
/// the two are the same database.
pub fn check(
    publisher: &Server,
    target: &Server,
    onto_itself: Option<&TableName>,
    findings: &mut Findings,
) {
    if publisher.started == target.started
        && publisher.database == target.database
        && let Some(table) = onto_itself
    {
        findings.error(
            format!(
                "`source` and `target` are the same database ({}): every change of {table} would \
                 be published again",
                target.database_sql()
            ),
            "Correct one of the two, or map the tables to a schema that is not published",
        );
    }
    if publisher.encoding == target.encoding {
        return;
    }
    let what = format!(
        "the publisher's encoding is {}, the target's {}",
        publisher.encoding, target.encoding
    );
    if publisher.encoding == "SQL_ASCII" {
        findings.warning(
            format!("{what}: text that is not ASCII is nothing the target could convert"),
            "Recode the publisher's database, or create the target with ENCODING 'SQL_ASCII'",
        );
    } else if target.encoding == "UTF8" {
        findings.note(format!("{what}; text is converted"));
    } else {
        findings.warning(
            format!("{what}: a character that the target's lacks stops the subscription"),
            "Create the target database with ENCODING 'UTF8'",
        );
    }
}
