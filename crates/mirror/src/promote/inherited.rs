//! What a standby's configuration has from its principal.

use farshore_pg::{Connection, Error};

/// Settings that a standby has from its principal, and that mean something only now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inherited {
    /// `synchronous_standby_names`.
    pub synchronous_standby_names: String,
    /// `archive_command` or `archive_library`, whichever is in use; empty if nothing is archived.
    pub archive: String,
}

impl Inherited {
    /// What they are on a server.
    ///
    /// # Errors
    /// The server's.
    pub(super) async fn ask(connection: &mut Connection) -> Result<Inherited, Error> {
        let sql = "SELECT current_setting('synchronous_standby_names'), \
                   CASE current_setting('archive_mode') WHEN 'off' THEN '' \
                   ELSE coalesce(nullif(current_setting('archive_library', true), ''), \
                   current_setting('archive_command')) END";
        let rows = connection.query(sql, &[]).await?;
        let text =
            |column| rows.first().and_then(|row| row.get(column)).unwrap_or_default().to_owned();
        Ok(Inherited { synchronous_standby_names: text(0), archive: text(1) })
    }

    /// What should be looked at, for a person.
    pub fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        if !self.synchronous_standby_names.is_empty() {
            words.push(format!(
                "Its synchronous_standby_names is \"{}\": commits there wait until such a standby \
                 streams from it. If none will: ALTER SYSTEM SET synchronous_standby_names = ''; \
                 SELECT pg_reload_conf()",
                self.synchronous_standby_names
            ));
        }
        if !self.archive.is_empty() {
            words.push(format!(
                "It archives its log from now on ({}), as the old principal may do: see that this \
                 is what you want",
                self.archive
            ));
        }
        words
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_matters_is_said() {
        assert_eq!(Inherited::default().words(), Vec::<String>::new());
        let names = Inherited {
            synchronous_standby_names: "ANY 1 (a, b)".to_owned(),
            archive: "cp %p /archive/%f".to_owned(),
        };
        let words = names.words();
        assert!(words[0].contains("\"ANY 1 (a, b)\": commits there wait"), "{words:?}");
        assert!(words[1].contains("(cp %p /archive/%f)"), "{words:?}");
    }
}
