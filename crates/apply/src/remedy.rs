//! What to do about what a target says, by SQLSTATE (PostgreSQL docs: appendix A, "PostgreSQL Error
//! Codes"). What passes by itself is tried again without anybody; the rest waits for a person.

use crate::error::code_passes_by_itself;
use farshore_capture::ONCE_THE_PASSWORD_IS_RIGHT;
use farshore_capture::publication::TableName;
use farshore_pg::{ServerError, is_lost_by_pooler, quote_literal};
use std::borrow::Cow;
use std::fmt::Write as _;

/// Tables of the schema `farshore` in which progress is kept.
const OF_PROGRESS: [&str; 3] = ["subscription", "table_copy", "range_copy"];

/// The next step where progress is not kept any more.
const PROGRESS_GONE: &str = "Farshore keeps its progress there, of all subscriptions into that \
     database: restore it; or empty the tables of all of them, DROP SCHEMA IF EXISTS farshore CASCADE \
     there, and go on (farshore resume) to copy anew";

/// The next step where another table of ours has gone.
const NOTES_GONE: &str = "Farshore keeps notes there, and no progress (recorded conflicts; requests \
     to skip; indexes and constraints that are still to be made): go on (farshore resume), which \
     makes the table again, empty";

/// The next step where a function on the target names what it does not find.
const UNKNOWN_IN_FUNCTION: &str = "A function on the target (`where` names it) meets something that \
     is not there, or that it names without its schema: as for PostgreSQL's own subscriptions, \
     search_path is empty. ALTER FUNCTION … SET search_path = … (or mend what it names) and go on \
     (farshore resume)";

/// The next step where a function on the target does what the role may not.
const DENIED_IN_FUNCTION: &str = "A function on the target (`where` names it) does that, with the \
     rights of Farshore's role: grant the role what the message says, or let the function have its \
     owner's (ALTER FUNCTION … SECURITY DEFINER SET search_path = …, since search_path is empty), and \
     go on (farshore resume)";

/// The next step where PgBouncer answers.
const POOLER: &str = "A connection pooler answers there: name the server itself in the site file \
     and restart the node";

/// The next step, as a sentence without its end.
pub fn next_step(code: &str) -> &'static str {
    match code {
        "42501" => {
            "The role lacks a privilege on the target: farshore check prints the SQL that grants \
             it; then go on (farshore resume)"
        }
        "25006" => {
            "The target takes no writes: it is a standby, or read-only by \
             default_transaction_read_only. Trying again until it does; if its primary has moved, \
             change target in the site file and restart the node"
        }
        "53100" => "The target's disk is full: make room there. Trying again until there is",
        "55P03" => "Another session on the target holds a lock (see pg_locks). Trying again",
        "57014" => {
            "The statement was cancelled on the target (by an administrator, or a time limit). \
             Trying again"
        }
        "40001" | "40P01" => "It clashed with another session on the target. Trying again",
        _ if code.starts_with("53") => {
            "The target lacks memory or connections (max_connections, or a CONNECTION LIMIT of the \
             role or the database): give it more. Trying again until it has them"
        }
        _ if code_passes_by_itself(code) => "Trying again",
        "28000" => {
            "Let the role log in to the target (LOGIN, pg_hba.conf) and go on (farshore resume), or \
             correct target in the site file and restart the node"
        }
        "28P01" => ONCE_THE_PASSWORD_IS_RIGHT,
        "3D000" => {
            "Create the database and go on (farshore resume), or correct target in the site file \
             and restart the node"
        }
        "42P01" | "42703" | "3F000" => {
            "A table, column or schema has gone from the target: put it back and go on (farshore \
             resume)"
        }
        _ => "Mend that on the target and go on (farshore resume)",
    }
}

/// As [`next_step`], where all is known that the server said.
pub(crate) fn next_step_of(error: &ServerError) -> Cow<'static, str> {
    match error.code.as_str() {
        _ if is_lost_by_pooler(error) => "Trying again".into(),
        "42501" if is_in_function(error) => DENIED_IN_FUNCTION.into(),
        "42P01" | "42703" | "3F000" | "42704" | "42883" if is_in_function(error) => {
            UNKNOWN_IN_FUNCTION.into()
        }
        code => missing_label(error).map_or_else(|| next_step(code).into(), Cow::Owned),
    }
}

/// It was raised within a function of the target: a trigger's, a default's or a constraint's.
fn is_in_function(error: &ServerError) -> bool {
    error.context.as_deref().is_some_and(|context| context.contains("function"))
}

/// The enum of the target, as SQL names it, and the label that it does not have.
pub(crate) fn enum_and_label(error: &ServerError) -> Option<(&str, &str)> {
    let said = error.message.strip_prefix("invalid input value for enum ")?;
    said.strip_suffix('"')?.split_once(": \"")
}

/// What renames a label as on the publisher, with what to do then.
pub(crate) fn rename_label(of: &str, from: &str, to: &str) -> String {
    let (from, to) = (quote_literal(from), quote_literal(to));
    format!(
        "The publisher has given the label {from} the name {to}, and rows on the target have the old \
         one. On the target: ALTER TYPE {of} RENAME VALUE {from} TO {to}. Then go on (farshore resume)"
    )
}

/// Where a value is a label that an enum of the target does not have (invalid text representation,
/// of an enum in either format): how it gets it.
pub(crate) fn missing_label(error: &ServerError) -> Option<String> {
    let (of, label) = enum_and_label(error)?;
    let label = quote_literal(label);
    Some(format!(
        "The target's enum lacks that label: on the target ALTER TYPE {of} ADD VALUE {label} (with \
         BEFORE or AFTER where it does not stand last on the publisher), or, where the publisher gave \
         another label this name, ALTER TYPE {of} RENAME VALUE '…' TO {label}: rows that have it would \
         keep the old one otherwise. Then go on (farshore resume)"
    ))
}

/// What follows an error of the target in its message: the next step, if the server has spoken.
pub fn sentence(error: &farshore_pg::Error) -> String {
    let Some(said) = error.server_error() else { return String::new() };
    let code = said.code.as_str();
    if code == "08P01" && said.message.contains("startup parameter") {
        return format!(". {POOLER}");
    }
    // A pooler that keeps us out does so until somebody mends it.
    if matches!(error, farshore_pg::Error::Auth { .. }) {
        return format!(". {}", next_step(code));
    }
    // PostgreSQL names what is not there as it was asked for.
    let gone = matches!(code, "42P01" | "3F000")
        .then(|| error.to_string())
        .and_then(|told| Some(told.split_once("\"farshore.")?.1.split_once('"')?.0.to_owned()));
    let next = match gone.as_deref() {
        Some(table) if OF_PROGRESS.contains(&table) => PROGRESS_GONE.into(),
        Some(_) => NOTES_GONE.into(),
        None => next_step_of(said),
    };
    format!(". {next}")
}

/// The next step where progress of this name follows the publication `noted`, and `wanted` is to be
/// followed: names of publications begin with those of the sites that they come by.
pub fn follows_another(subscription: &str, noted: &str, wanted: &str) -> String {
    let last = |publication: &str| publication.rsplit('/').next().map(str::to_owned);
    if last(noted) != last(wanted) {
        return "Rename one of the two".to_owned();
    }
    format!(
        "If it is the same subscription, and a site was renamed or the log comes another way, run on \
         the target: UPDATE farshore.subscription SET publication = {} WHERE name = {}. Otherwise \
         rename one of the two",
        quote_literal(wanted),
        quote_literal(subscription)
    )
}

/// The command that empties one table, or all, on the target and copies it anew, for a shell.
pub(crate) fn resync(subscription: &str, table: Option<&TableName>) -> String {
    let mut command =
        format!("farshore resync SITE.toml --subscription {}", for_shell(subscription));
    if let Some(table) = table {
        let _ = write!(command, " --table {}", for_shell(&table.to_string()));
    }
    command
}

fn for_shell(word: &str) -> Cow<'_, str> {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "_-./:".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        Cow::Borrowed(word)
    } else {
        Cow::Owned(format!("'{}'", word.replace('\'', "'\\''")))
    }
}

#[cfg(test)]
mod tests {
    use super::{follows_another, for_shell, next_step, next_step_of, resync, sentence};
    use crate::error::{code_passes_by_itself, is_about_data, passes_by_itself};
    use farshore_pg::ServerError;

    #[test]
    fn commands_are_for_a_shell() {
        assert_eq!(resync("s", None), "farshore resync SITE.toml --subscription s");
        assert_eq!(for_shell("public.t"), "public.t");
        assert_eq!(for_shell("public.\"it's $1\""), "'public.\"it'\\''s $1\"'");
    }

    #[test]
    fn the_way_back_after_a_site_was_renamed_is_told() {
        let told = follows_another("it's", "old/sales", "new/sales");
        let update = "UPDATE farshore.subscription SET publication = 'new/sales' WHERE name = \
                      'it''s'";
        assert!(
            told.contains(update) && told.ends_with("Otherwise rename one of the two"),
            "{told}"
        );
        let chained = follows_another("s", "middle/old/sales", "new/sales");
        assert!(chained.contains("UPDATE"), "{chained}");
        assert_eq!(follows_another("s", "t1/p", "t1/q"), "Rename one of the two");
    }

    #[test]
    fn what_ends_the_session_is_no_conflict() {
        let said = |code: &str, severity: &str, message: &str| ServerError {
            code: code.into(),
            severity: severity.into(),
            message: message.into(),
            ..ServerError::default()
        };
        let lost = said("08P01", "FATAL", "server conn crashed?");
        assert!(passes_by_itself(&lost) && !is_about_data(&lost));
        assert_eq!(next_step_of(&lost), "Trying again");
        let bytes = said("08P01", "ERROR", "insufficient data left in message");
        assert!(!passes_by_itself(&bytes) && is_about_data(&bytes));
        let pooler = said("08P01", "FATAL", "unsupported startup parameter: options");
        assert!(!passes_by_itself(&pooler) && !is_about_data(&pooler));
        assert!(!is_about_data(&said("22023", "FATAL", "")));
    }

    #[test]
    fn of_our_own_tables_some_hold_progress() {
        for (table, next) in [
            ("farshore.table_copy", "farshore CASCADE"),
            ("farshore.conflicts", "makes the table again"),
            ("public.t", "put it back"),
        ] {
            let error = farshore_pg::Error::Server(Box::new(ServerError {
                code: "42P01".into(),
                severity: "ERROR".into(),
                message: format!("relation \"{table}\" does not exist"),
                ..ServerError::default()
            }));
            let told = sentence(&error);
            assert!(told.contains(next) && told.contains("farshore resume"), "{table}: {told}");
        }
    }

    #[test]
    fn what_comes_from_within_a_function_is_told_apart() {
        let within = |code: &str, context: &str| {
            let context = (!context.is_empty()).then(|| context.to_owned());
            next_step_of(&ServerError { code: code.into(), context, ..ServerError::default() })
        };
        let function = "PL/pgSQL function public.f() line 1 at SQL statement";
        let denied = within("42501", function);
        assert!(denied.contains("SECURITY DEFINER") && denied.contains("search_path"), "{denied}");
        let unknown = within("42P01", function);
        assert!(unknown.contains("SET search_path"), "{unknown}");
        assert!(within("42501", "").contains("farshore check"));
        assert!(within("42P01", "").contains("gone from the target"));
    }

    #[test]
    fn a_label_that_an_enum_lacks_is_given_with_the_sql() {
        let message = "invalid input value for enum s.\"Mood\": \"it's: \"new\"\"".to_owned();
        let error = ServerError { code: "22P02".into(), message, ..ServerError::default() };
        let told = next_step_of(&error);
        let sql = "ALTER TYPE s.\"Mood\" ADD VALUE 'it''s: \"new\"'";
        assert!(told.contains(sql) && told.contains("farshore resume"), "{told}");
    }

    #[test]
    fn a_pooler_that_keeps_us_out_is_not_tried_again() {
        let refusal = ServerError {
            code: "08P01".into(),
            severity: "FATAL".into(),
            message: "no such user: app".into(),
            ..ServerError::default()
        };
        let error = farshore_pg::Error::Auth {
            server: "s".into(),
            reason: refusal.to_string(),
            refusal: Some(Box::new(refusal)),
        };
        let told = sentence(&error);
        assert!(!error.is_transient() && told.contains("farshore resume"), "{told}");
    }

    #[test]
    fn what_passes_by_itself_says_so_and_nothing_else_does() {
        for code in [
            "25006", "25P04", "40001", "40P01", "53000", "53100", "53200", "53300", "55P03",
            "57014", "57P01", "57P03", "58030", "08006", "28000", "28P01", "3D000", "42501",
            "42P01", "42703", "0A000", "42883", "55000", "XX000",
        ] {
            let step = next_step(code);
            assert_eq!(
                step.contains("Trying again"),
                code_passes_by_itself(code),
                "{code}: {step}"
            );
            assert!(
                code_passes_by_itself(code) || step.contains("farshore resume"),
                "{code}: {step}"
            );
        }
    }
}
