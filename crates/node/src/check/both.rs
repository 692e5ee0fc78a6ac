//! Two servers side by side.

use super::Findings;
use super::server::Server;

/// Looks at what holds only of a pair.
pub fn check(publisher: &Server, target: &Server, findings: &mut Findings) {
    if publisher.started == target.started && publisher.database == target.database {
        findings.error(
            format!(
                "`source` and `target` are the same database ({}): every change would be \
                 published again",
                target.database_sql()
            ),
            "Correct one of the two",
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
