//! What publications publish that the site file adopts: it names none of their tables.

use crate::config::SiteConfig;
use farshore_capture::publication::{PublicationSpec, TableName};
use farshore_pg::Mode;
use std::collections::HashMap;
use std::time::Duration;

/// How long is waited for each publisher.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// By publication: its tables, and whether rows of each are filtered.
#[derive(Debug, Default)]
pub struct Adopted(HashMap<String, HashMap<TableName, bool>>);

impl Adopted {
    /// Asks publishers, where more than one subscription makes it worth while. One that does not
    /// answer is told of elsewhere.
    pub async fn ask(config: &SiteConfig) -> Adopted {
        let mut all = HashMap::new();
        for publication in &config.publications {
            let spec = &publication.spec;
            if spec.adopt_publication.is_none() || config.subscriptions.len() < 2 {
                continue;
            }
            let asked = async {
                let mut sql = spec.connect(Mode::Sql).await?;
                spec.published_tables(&mut sql).await
            };
            let Ok(Ok(tables)) = tokio::time::timeout(ANSWER_WITHIN, asked).await else { continue };
            let tables = tables.into_iter().map(|table| (table.table, table.row_filter.is_some()));
            all.insert(spec.name.clone(), tables.collect());
        }
        Adopted(all)
    }

    /// Whether a publication has a table.
    pub fn has(&self, spec: &PublicationSpec, table: &TableName) -> bool {
        if spec.adopt_publication.is_none() {
            return spec.tables.iter().any(|pattern| pattern.matches(table));
        }
        self.0.get(&spec.name).is_some_and(|tables| tables.contains_key(table))
    }

    /// Whether not all of a table's rows are published.
    pub fn is_filtered(&self, spec: &PublicationSpec, table: &TableName) -> bool {
        let of_article = spec.articles.get(table).is_some_and(|it| it.row_filter.is_some());
        let adopted = self.0.get(&spec.name).and_then(|tables| tables.get(table));
        of_article || adopted.copied().unwrap_or(false)
    }
}
