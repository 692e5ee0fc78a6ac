use super::present::Present;
use farshore_capture::publication::TableName;
use farshore_capture::schema::{AfterStatement, Plan, Stage, TablePlan};
use std::collections::{HashMap, HashSet};

/// What is to be done on a target: a plan, less what is there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// In order, before the copy.
    pub steps: Vec<Step>,
    /// Extensions that something needs and the target cannot have.
    pub unavailable: Vec<String>,
}

/// Statements that belong into one transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What they make, for messages.
    pub object: String,
    /// In order.
    pub sql: Vec<String>,
    /// The table they make, by its name on the target.
    pub table: Option<TableName>,
    /// What is to follow the copy of that table.
    pub after: Vec<AfterStatement>,
    /// What it has on the publisher and will not have here.
    pub left_out: Vec<String>,
    /// The partitioned table that it is made a partition of.
    pub partition_of: Option<TableName>,
    /// It can be done without: where the target's partitions leave no room for it, they take its
    /// rows.
    pub gives_way: bool,
    /// How it is made if its parent on the target has other columns than the publisher's has.
    pub as_its_parent: Option<AsItsParent>,
}

/// A partition with the columns of its parent on the target, whatever they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AsItsParent {
    /// Makes it.
    pub sql: String,
    /// The columns that it has on the publisher, if rows come for it by its own name: these must be
    /// there.
    pub columns: Vec<String>,
}

impl Outline {
    /// `published` are tables that rows will come for, `copied` those whose rows are there (both
    /// by the publisher's names): of the latter, none is made anew.
    pub(super) fn new(
        plan: Plan,
        present: &Present,
        published: &HashSet<TableName>,
        copied: &HashSet<TableName>,
    ) -> Outline {
        let chosen = chosen(&plan.tables, present, published, copied);
        let mut steps = Vec::new();
        let mut made: HashSet<TableName> = HashSet::new();
        // Of these, all that they are a part of is made too.
        let mut made_whole: HashSet<TableName> = HashSet::new();
        for table in &plan.tables {
            let parent = table.partition_of.as_ref();
            let parent_made = parent.is_some_and(|parent| made.contains(parent));
            let parent_partitioned = parent_made
                || parent.and_then(|p| present.table(p)).is_some_and(|p| p.is_partitioned());
            if chosen.contains(&table.target) {
                made.insert(table.target.clone());
                let parent_whole = parent.is_some_and(|parent| made_whole.contains(parent));
                if parent_whole || !parent_partitioned {
                    made_whole.insert(table.target.clone());
                }
                let mut step = create(table, parent_partitioned, parent_whole);
                let is_published = published.contains(&table.source);
                let parent_was_there = parent_partitioned && !parent_made;
                step.gives_way = parent_was_there && !is_published;
                if parent_was_there {
                    step.as_its_parent = as_its_parent(table, is_published);
                }
                steps.push(step);
            } else if parent_partitioned
                && let (Some(attach), Some(there)) = (&table.attach, present.table(&table.target))
                && there.partition_of.is_none()
            {
                steps.push(Step {
                    object: format!("partition {}", table.target),
                    sql: vec![attach.clone()],
                    table: None,
                    after: Vec::new(),
                    left_out: Vec::new(),
                    partition_of: table.partition_of.clone(),
                    gives_way: false,
                    as_its_parent: None,
                });
            }
        }
        if !made.is_empty() {
            let missing = plan.objects.into_iter().filter(|c| !present.has(&c.object));
            let objects = missing.map(|creation| Step {
                object: creation.object.to_string(),
                sql: vec![creation.sql],
                table: None,
                after: Vec::new(),
                left_out: Vec::new(),
                partition_of: None,
                gives_way: false,
                as_its_parent: None,
            });
            steps = objects.chain(steps).collect();
        }
        Outline { steps, unavailable: Vec::new() }
    }

    /// What is to follow the copy, in order. Indexes of partitions are made from the leaves up: the
    /// one of a table that has partitions makes those that its partitions lack, under other names.
    pub fn after_copy(&self) -> Vec<&AfterStatement> {
        let all = || self.steps.iter().flat_map(|step| &step.after);
        let of_partitions = |after: &&AfterStatement| after.stage == Stage::PartitionIndexes;
        let mut ordered: Vec<&AfterStatement> = all().filter(of_partitions).collect();
        ordered.reverse();
        let mut rest: Vec<&AfterStatement> = all().filter(|after| !of_partitions(after)).collect();
        rest.sort_by_key(|after| after.stage);
        ordered.append(&mut rest);
        ordered
    }
}

/// Tables to make, by their names on the target: those that rows will come for, what they are
/// partitions of, and the partitions of partitioned tables that will be there, or are there and
/// partitioned as on the publisher: one that is partitioned otherwise has partitions of its own for
/// all rows.
fn chosen(
    tables: &[TablePlan],
    present: &Present,
    published: &HashSet<TableName>,
    copied: &HashSet<TableName>,
) -> HashSet<TableName> {
    let missing = |table: &TablePlan| {
        present.table(&table.target).is_none() && !copied.contains(&table.source)
    };
    let mut chosen: HashSet<TableName> = HashSet::new();
    // Parents come first in `tables`, so backwards every table is met before its parent.
    for table in tables.iter().rev() {
        if missing(table) && (published.contains(&table.source) || chosen.contains(&table.target)) {
            chosen.insert(table.target.clone());
            chosen.extend(table.partition_of.clone());
        }
    }
    let keys: HashMap<&TableName, &Option<String>> =
        tables.iter().map(|table| (&table.target, &table.partition_key)).collect();
    let may_take = |parent: &TableName, bound: &str| {
        let there = present.table(parent).filter(|there| there.is_partitioned());
        there.is_some_and(|there| keys.get(parent) == Some(&&there.partition_key))
            && !present.has_partition(parent, bound)
    };
    for table in tables {
        let (Some(parent), Some(bound)) = (&table.partition_of, &table.bound) else { continue };
        if missing(table) && (may_take(parent, bound) || chosen.contains(parent)) {
            chosen.insert(table.target.clone());
        }
    }
    chosen.retain(|table| present.table(table).is_none());
    chosen
}

fn create(table: &TablePlan, attach: bool, parent_whole: bool) -> Step {
    let mut sql = table.create.clone();
    if attach {
        sql.extend(table.attach.clone());
    }
    // An index of the parent comes along when the parent has it already (as one has that became a
    // part of a table with indexes), or makes it later; made here by name before the parent's, it
    // becomes a part of that. Checks and foreign keys of the parent always come along.
    let is_wanted = |after: &&AfterStatement| {
        !after.from_parent || !attach || parent_whole && after.stage < Stage::Checks
    };
    let after = table.after.iter().filter(is_wanted);
    Step {
        object: format!("table {}", table.target),
        sql,
        table: Some(table.target.clone()),
        after: after.cloned().collect(),
        left_out: table.left_out.clone(),
        partition_of: table.partition_of.clone().filter(|_| attach),
        gives_way: false,
        as_its_parent: None,
    }
}

fn as_its_parent(table: &TablePlan, is_published: bool) -> Option<AsItsParent> {
    let (parent, bound) = (table.partition_of.as_ref()?, table.bound.as_ref()?);
    let mut sql = format!("CREATE TABLE {} PARTITION OF {parent} {bound}", table.target);
    if let Some(key) = &table.partition_key {
        sql.push_str(&format!(" PARTITION BY {key}"));
    }
    let columns = if is_published { table.columns.clone() } else { Vec::new() };
    Some(AsItsParent { sql, columns })
}

#[cfg(test)]
mod tests {
    use super::super::present::PresentTable;
    use super::*;

    fn name(name: &str) -> TableName {
        TableName { schema: "s".into(), name: name.into() }
    }

    fn plan(tables: &[(&str, Option<&str>)]) -> Plan {
        let table = |(table, parent): &(&str, Option<&str>)| TablePlan {
            source: name(table),
            target: name(table),
            partition_of: parent.map(name),
            bound: parent.map(|_| format!("bound of {table}")),
            partition_key: (*table == "root").then(|| "LIST (a)".to_owned()),
            columns: Vec::new(),
            create: vec![format!("create {table}")],
            attach: parent.map(|_| format!("attach {table}")),
            after: Vec::new(),
            left_out: Vec::new(),
        };
        Plan { objects: Vec::new(), tables: tables.iter().map(table).collect() }
    }

    fn statements(
        present: &[(&str, bool, Option<&str>)],
        published: &[&str],
        copied: &[&str],
    ) -> Vec<String> {
        let present = Present::of(present.iter().map(|(table, partitioned, parent)| {
            let there = PresentTable {
                partition_key: partitioned.then(|| "LIST (a)".to_owned()),
                partition_of: parent.map(name),
                bound: parent.map(|_| format!("bound of {table}")),
            };
            (name(table), there)
        }));
        outlined(&present, published, copied).into_iter().flat_map(|step| step.sql).collect()
    }

    fn outlined(present: &Present, published: &[&str], copied: &[&str]) -> Vec<Step> {
        let plan =
            plan(&[("plain", None), ("root", None), ("one", Some("root")), ("two", Some("root"))]);
        let set = |tables: &[&str]| tables.iter().map(|table| name(table)).collect();
        Outline::new(plan, present, &set(published), &set(copied)).steps
    }

    #[test]
    fn just_what_is_missing_is_made() {
        let leaves = ["plain", "one", "two"];
        assert_eq!(
            statements(&[], &leaves, &[]),
            ["create plain", "create root", "create one", "attach one", "create two", "attach two"]
        );
        // Through the root, and leaf to leaf with a new leaf.
        assert_eq!(statements(&[], &["root"], &[]).len(), 5);
        assert_eq!(
            statements(&[("root", true, None), ("one", false, Some("root"))], &["two"], &["one"]),
            ["create two", "attach two"]
        );
        // Leaves that are plain tables on the target stay so.
        let plain = [("plain", false, None), ("one", false, None), ("two", false, None)];
        assert_eq!(statements(&plain, &leaves, &[]), [""; 0]);
        // A root that is a plain table on the target has no partitions there.
        assert_eq!(statements(&[("root", false, None)], &["root"], &[]), [""; 0]);
        // A table that became a partition on the publisher.
        let attached = [("root", true, None), ("one", false, Some("root")), ("two", false, None)];
        assert_eq!(statements(&attached, &["root"], &["root", "two"]), ["attach two"]);
        // What was copied and is gone is not made anew: it would be empty.
        assert_eq!(statements(&[], &["plain"], &["plain"]), [""; 0]);
    }

    #[test]
    fn a_table_that_is_partitioned_otherwise_keeps_its_partitions() {
        let root = |key: &str| {
            let there =
                PresentTable { partition_key: Some(key.into()), partition_of: None, bound: None };
            (name("root"), there)
        };
        let partition = |table: &str, bound: &str| {
            let (partition_of, bound) = (Some(name("root")), Some(bound.to_owned()));
            (name(table), PresentTable { partition_key: None, partition_of, bound })
        };
        let objects = |present: &Present| -> Vec<(String, bool)> {
            let steps = outlined(present, &["root"], &[]);
            steps.into_iter().map(|step| (step.object, step.gives_way)).collect()
        };
        let otherwise = Present::of([root("HASH (a)"), partition("h", "bound of all")]);
        assert_eq!(objects(&otherwise), []);
        // What a bound overlaps, the target alone can tell.
        let alike = Present::of([root("LIST (a)"), partition("other", "bound of one")]);
        assert_eq!(objects(&alike), [("table s.two".to_owned(), true)]);
        // Rows come for partitions by their own names.
        let steps = outlined(&otherwise, &["one", "two"], &[]);
        assert_eq!(steps.iter().map(|step| step.gives_way).collect::<Vec<_>>(), [false, false]);
    }

    /// Indexes are made from the leaves up, and left to a parent that has its own already; checks are
    /// left to every parent.
    #[test]
    fn what_a_parent_brings_along_is_left_to_it() {
        let after = |table: &str| {
            let index = (Stage::PartitionIndexes, "index");
            let root = [(Stage::Indexes, "index"), (Stage::Checks, "check")];
            let other = [index, (Stage::PartitionIndexes, "second"), (Stage::Checks, "check")];
            let all = if table == "root" { &root[..] } else { &other[..] };
            let statement = |(stage, what): &(Stage, &str)| AfterStatement {
                stage: *stage,
                object: format!("{what} {table}"),
                sql: String::new(),
                from_parent: table != "root" && *what != "second",
            };
            all.iter().map(statement).collect::<Vec<_>>()
        };
        let mut plan = plan(&[("root", None), ("middle", Some("root")), ("leaf", Some("middle"))]);
        for table in &mut plan.tables {
            table.after = after(&table.source.name);
        }
        plan.tables[1].partition_key = Some("LIST (b)".to_owned());
        let objects = |root: Option<Option<&str>>| -> Vec<String> {
            let there = root.map(|key| PresentTable {
                partition_key: key.map(str::to_owned),
                partition_of: None,
                bound: None,
            });
            let present = Present::of(there.map(|there| (name("root"), there)));
            let published = HashSet::from([name("root"), name("leaf")]);
            let outline = Outline::new(plan.clone(), &present, &published, &HashSet::new());
            outline.after_copy().into_iter().map(|after| after.object.clone()).collect()
        };
        let all = "second leaf, index leaf, second middle, index middle, index root, check root";
        assert_eq!(objects(None).join(", "), all);
        assert_eq!(objects(Some(Some("LIST (a)"))), ["second leaf", "second middle"]);
        // The middle one has no place in a plain table.
        let apart = "second leaf, index leaf, second middle, index middle, check middle";
        assert_eq!(objects(Some(None)).join(", "), apart);
    }
}
