//! The SQL that would create what a subscription's target lacks. Changes nothing.

use crate::config::{Publication, SiteConfig, Subscription};
use farshore_apply::ApplyError;
use farshore_apply::postgres::schema::{AFTER_ORDER, outline_of};
use farshore_apply::postgres::session::Session;
use farshore_capture::publication::Unfit;
use farshore_pg::Mode;
use serde::Serialize;
use std::collections::HashSet;

/// What would be run on one subscription's target.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SubscriptionSchema {
    /// The subscription.
    pub subscription: String,
    /// In order, before the copy.
    pub before: Vec<Statement>,
    /// In order, after the copy.
    pub after: Vec<Statement>,
    /// What the publisher has and the target will not have.
    pub left_out: Vec<String>,
    /// Why nothing of it is known, if that is so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// One statement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Statement {
    /// What it makes.
    pub object: String,
    /// The statement, without a semicolon.
    pub sql: String,
}

/// What would be run for every subscription, or for the one called `only`.
///
/// # Errors
/// When a server cannot be asked, with the subscription that needs it.
pub async fn outline_site(
    config: &SiteConfig,
    only: Option<&str>,
) -> Result<Vec<SubscriptionSchema>, String> {
    let mut all = Vec::new();
    for subscription in &config.subscriptions {
        let name = &subscription.spec.name;
        if only.is_some_and(|only| only != name) {
            continue;
        }
        let Some(publication) = config.publication(&subscription.publication) else {
            let why = format!(
                "its publication is received from another site ({}), which alone can ask the \
                 publisher for its definitions. What the target lacks is made when the node runs \
                 (unless create_tables = false); farshore check and the log of farshore run say \
                 what it is",
                subscription.publication
            );
            if only.is_none() {
                let subscription = name.clone();
                let unknown = Some(why);
                all.push(SubscriptionSchema { subscription, unknown, ..Default::default() });
                continue;
            }
            return Err(format!("subscription \"{name}\": {why}"));
        };
        let outlined = outline(publication, subscription).await;
        all.push(outlined.map_err(|error| format!("subscription \"{name}\": {error}"))?);
    }
    match only {
        Some(only) if all.is_empty() => {
            Err(format!("the site file has no subscription \"{only}\""))
        }
        _ => Ok(all),
    }
}

async fn outline(
    publication: &Publication,
    subscription: &Subscription,
) -> Result<SubscriptionSchema, ApplyError> {
    let spec = &subscription.spec;
    let mut schema =
        SubscriptionSchema { subscription: spec.name.clone(), ..SubscriptionSchema::default() };
    let mut session = Session::connect(&spec.target, "farshore schema").await?;
    let copied = copied_tables(&mut session, spec.name.as_str(), &mut schema).await?;
    if !spec.schema.create_tables {
        return Ok(schema);
    }
    let mut sql = publication.spec.connect(Mode::Sql).await?;
    let wanted = publication.spec.would_publish(&mut sql, Unfit::Refuse).await?;
    let definitions =
        publication.spec.definitions_of(&mut sql, &wanted.oids, &wanted.listed).await?;
    let definitions = definitions.as_sent(&wanted.columns);
    let published: HashSet<_> =
        wanted.tables.into_iter().filter(|table| !copied.contains(table)).collect();
    let outline = outline_of(&mut session, &spec.schema, &definitions, &published, &copied).await?;
    for step in &outline.steps {
        schema.before.extend(
            step.sql.iter().map(|sql| Statement { object: step.object.clone(), sql: sql.clone() }),
        );
        schema.left_out.extend(step.left_out.iter().map(|what| format!("{}: {what}", step.object)));
    }
    schema.after.extend(
        outline
            .after_copy()
            .into_iter()
            .map(|after| Statement { object: after.object.clone(), sql: after.sql.clone() }),
    );
    schema.left_out.extend(outline.unavailable.iter().map(|name| format!("extension {name}")));
    Ok(schema)
}

/// What the target has copied already, and what waits there for the end of a copy.
async fn copied_tables(
    session: &mut Session,
    subscription: &str,
    schema: &mut SubscriptionSchema,
) -> Result<HashSet<farshore_capture::publication::TableName>, ApplyError> {
    let present =
        session.query("SELECT to_regclass('farshore.after_copy') IS NOT NULL", &[]).await?;
    if present.first().and_then(|row| row.get(0)) != Some("t") {
        return Ok(HashSet::new());
    }
    let waiting = session
        .query(
            &format!(
                "SELECT object, statement FROM farshore.after_copy \
                 WHERE subscription = $1 AND refusal IS NULL ORDER BY {AFTER_ORDER}"
            ),
            &[Some(subscription)],
        )
        .await?;
    let text =
        |row: &farshore_pg::Row, column: usize| row.get(column).unwrap_or_default().to_owned();
    schema
        .after
        .extend(waiting.iter().map(|row| Statement { object: text(row, 0), sql: text(row, 1) }));
    let tables = session.load_tables(subscription).await?;
    Ok(tables.into_iter().filter(|table| table.copied).map(|table| table.table).collect())
}
