//! Is there one order that explains what everybody saw?

use super::graph::Graph;
use super::{Moment, Operation, Outcome, Transaction};
use std::collections::{BTreeMap, HashMap};
use std::fmt::{self, Write as _};

/// Elements of a list that a report shows, from its end.
const ELEMENTS_SHOWN: usize = 6;

/// What a check that found nothing wrong has seen.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Transactions that returned.
    pub returned: usize,
    /// Of unknown outcome, and seen to have happened.
    pub happened: usize,
    /// Of unknown outcome, and never seen.
    pub unseen: usize,
    /// Rolled back.
    pub aborted: usize,
    /// Lists that were read or appended to.
    pub lists: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { returned, happened, unseen, aborted, lists } = self;
        write!(
            f,
            "strictly serializable: {returned} transactions on {lists} lists returned, {aborted} were \
             rolled back, and of unknown outcome were {happened} that happened and {unseen} unseen"
        )
    }
}

/// What is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Anomaly {
    /// The history itself is none: an element was appended twice by clients, or time ran back.
    NoHistory,
    /// An element was read that nobody appended.
    FromNowhere,
    /// An element was read that was rolled back.
    AbortedRead,
    /// An element stands in a list twice.
    Doubled,
    /// A transaction does not see what it did itself, or sees a list change.
    Internal,
    /// Two reads of one list do not begin alike: no order of appends explains both.
    Disagreement,
    /// Transactions come before each other in a circle.
    Cycle,
}

/// There is no such order; the text says why.
#[derive(Debug, Clone)]
pub struct Violation {
    /// What is wrong.
    pub anomaly: Anomaly,
    report: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not strictly serializable ({:?}): {}", self.anomaly, self.report)
    }
}

impl std::error::Error for Violation {}

fn violation(anomaly: Anomaly, report: String) -> Violation {
    Violation { anomaly, report }
}

/// Looks for one order of all transactions that explains what they read and keeps to real time.
/// What was rolled back must not be seen; what has an unknown outcome counts if it was seen.
///
/// # Errors
/// Why there is none.
pub fn check(history: &[Transaction]) -> Result<Summary, Violation> {
    let facts = Facts::gather(history)?;
    let mut graph = Graph::new(history.len());
    facts.add_order_of_lists(&mut graph);
    facts.add_real_time(&mut graph);
    if let Some(cycle) = graph.cycle() {
        return Err(facts.explain(&cycle));
    }
    let count = |of: fn(&Outcome) -> bool| history.iter().filter(|t| of(&t.outcome)).count();
    let returned = count(|outcome| matches!(outcome, Outcome::Returned(_)));
    let happened = facts.happened.iter().filter(|happened| **happened).count() - returned;
    Ok(Summary {
        returned,
        happened,
        unseen: count(|outcome| *outcome == Outcome::Unknown) - happened,
        aborted: count(|outcome| *outcome == Outcome::Aborted),
        lists: facts.orders.len(),
    })
}

/// Why a transaction comes before another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    /// ww: it appended to this list first.
    AppendedFirst(i64),
    /// wr: the other one read what it appended to this list.
    WasRead(i64),
    /// rw: it read this list without what the other one appended.
    DidNotSee(i64),
    /// It had returned before the other one was invoked.
    RealTime,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::AppendedFirst(key) => write!(f, "appended to list {key} before the next did (ww)"),
            Why::WasRead(key) => write!(f, "appended to list {key} what the next read (wr)"),
            Why::DidNotSee(key) => {
                write!(f, "read list {key} without what the next appended (rw)")
            }
            Why::RealTime => f.write_str("returned before the next was invoked (real time)"),
        }
    }
}

/// What is known of a history before an order is looked for.
struct Facts<'a> {
    history: &'a [Transaction],
    /// Who appended this element to this list.
    appenders: HashMap<(i64, i64), usize>,
    /// Which transactions returned, or were seen.
    happened: Vec<bool>,
    /// Every list at its longest.
    orders: BTreeMap<i64, Vec<i64>>,
}

impl<'a> Facts<'a> {
    fn gather(history: &'a [Transaction]) -> Result<Facts<'a>, Violation> {
        let mut facts = Facts {
            history,
            appenders: HashMap::new(),
            happened: vec![false; history.len()],
            orders: BTreeMap::new(),
        };
        for (number, transaction) in history.iter().enumerate() {
            if matches!(transaction.outcome, Outcome::Returned(at) if at < transaction.invoked) {
                let report = format!("{} returned before it was invoked", facts.name(number));
                return Err(violation(Anomaly::NoHistory, report));
            }
            for operation in &transaction.operations {
                if let Operation::Append { key, element } = operation
                    && let Some(other) = facts.appenders.insert((*key, *element), number)
                {
                    let report = format!(
                        "{} and {} both append {element} to list {key}",
                        facts.name(other),
                        facts.name(number)
                    );
                    return Err(violation(Anomaly::NoHistory, report));
                }
            }
        }
        facts.find_what_happened()?;
        facts.find_orders()?;
        Ok(facts)
    }

    /// What returned, what that has seen, what those have seen, and so on.
    fn find_what_happened(&mut self) -> Result<(), Violation> {
        let returned = |t: &Transaction| matches!(t.outcome, Outcome::Returned(_));
        let numbers = 0..self.history.len();
        let mut open: Vec<usize> =
            numbers.filter(|number| returned(&self.history[*number])).collect();
        for number in &open {
            self.happened[*number] = true;
        }
        while let Some(reader) = open.pop() {
            for (key, elements) in reads(&self.history[reader]) {
                for element in elements {
                    let Some(appender) = self.appenders.get(&(key, *element)).copied() else {
                        let report = format!(
                            "{} read {element} in list {key}, which nobody appended",
                            self.name(reader)
                        );
                        return Err(violation(Anomaly::FromNowhere, report));
                    };
                    if self.history[appender].outcome == Outcome::Aborted {
                        let report = format!(
                            "{} read {element} in list {key}, which was rolled back: {}",
                            self.name(reader),
                            self.name(appender)
                        );
                        return Err(violation(Anomaly::AbortedRead, report));
                    }
                    if !self.happened[appender] {
                        self.happened[appender] = true;
                        open.push(appender);
                    }
                }
            }
        }
        Ok(())
    }

    fn happened(&self) -> impl Iterator<Item = (usize, &'a Transaction)> {
        let all = self.history.iter().enumerate();
        all.filter(|(number, _)| self.happened[*number])
    }

    fn find_orders(&mut self) -> Result<(), Violation> {
        let mut longest: BTreeMap<i64, (usize, &[i64])> = BTreeMap::new();
        for (number, transaction) in self.happened() {
            self.check_internal(number)?;
            for operation in &transaction.operations {
                let (Operation::Append { key, .. } | Operation::Read { key, .. }) = operation;
                longest.entry(*key).or_insert((number, &[]));
            }
            for (key, elements) in reads(transaction) {
                let mut sorted = elements.to_vec();
                sorted.sort_unstable();
                if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                    let report =
                        format!("{} read {} in list {key} twice", self.name(number), twice[0]);
                    return Err(violation(Anomaly::Doubled, report));
                }
                let so_far = longest.entry(key).or_insert((number, elements));
                if elements.len() > so_far.1.len() {
                    *so_far = (number, elements);
                }
            }
        }
        for (number, transaction) in self.happened() {
            for (key, elements) in reads(transaction) {
                let Some((other, order)) = longest.get(&key) else { continue };
                if !order.starts_with(elements) {
                    let report = format!(
                        "no order of appends to list {key} explains both\n  {}\n  {}",
                        self.name(number),
                        self.name(*other)
                    );
                    return Err(violation(Anomaly::Disagreement, report));
                }
            }
        }
        self.orders =
            longest.into_iter().map(|(key, (_, elements))| (key, elements.to_vec())).collect();
        Ok(())
    }

    /// A transaction sees one state of the world, and what it did itself.
    fn check_internal(&self, number: usize) -> Result<(), Violation> {
        let mut expected: HashMap<i64, Vec<i64>> = HashMap::new();
        let mut own: HashMap<i64, Vec<i64>> = HashMap::new();
        for operation in &self.history[number].operations {
            match operation {
                Operation::Append { key, element } => {
                    own.entry(*key).or_default().push(*element);
                    expected.entry(*key).and_modify(|list| list.push(*element));
                }
                Operation::Read { key, elements } => {
                    let own = own.get(key).map_or(&[][..], Vec::as_slice);
                    let is_as_before = expected.get(key).is_none_or(|list| list == elements);
                    if !elements.ends_with(own) || !is_as_before {
                        let report =
                            format!("{} does not see what it did itself", self.name(number));
                        return Err(violation(Anomaly::Internal, report));
                    }
                    expected.insert(*key, elements.clone());
                }
            }
        }
        Ok(())
    }

    /// The order in which lists were appended to, and where their readers stand in it. What nobody
    /// has read of a list comes after all that was read.
    fn add_order_of_lists(&self, graph: &mut Graph<Why>) {
        let mut unread: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
        for (number, transaction) in self.happened() {
            for operation in &transaction.operations {
                if let Operation::Append { key, element } = operation
                    && self.orders.get(key).is_none_or(|order| !order.contains(element))
                {
                    unread.entry(*key).or_default().push(number);
                }
            }
        }
        let unread = |key: i64| unread.get(&key).map_or(&[][..], Vec::as_slice);
        let appender = |key: i64, element: i64| self.appenders.get(&(key, element)).copied();
        for (key, order) in &self.orders {
            for pair in order.windows(2) {
                if let (Some(one), Some(next)) = (appender(*key, pair[0]), appender(*key, pair[1]))
                {
                    graph.add(one, next, Why::AppendedFirst(*key));
                }
            }
            if let Some(last) = order.last().and_then(|last| appender(*key, *last)) {
                for after in unread(*key) {
                    graph.add(last, *after, Why::AppendedFirst(*key));
                }
            }
        }
        for (reader, transaction) in self.happened() {
            for (key, elements) in reads(transaction) {
                // Its own elements were not there for others to come before.
                let is_own = |element: &i64| appender(key, *element) == Some(reader);
                let others = elements.iter().take_while(|element| !is_own(element)).count();
                let last = elements[..others].last().and_then(|last| appender(key, *last));
                if let Some(last) = last {
                    graph.add(last, reader, Why::WasRead(key));
                }
                let order = self.orders.get(&key).map_or(&[][..], Vec::as_slice);
                match order.get(elements.len()) {
                    Some(next) => {
                        if let Some(next) = appender(key, *next) {
                            graph.add(reader, next, Why::DidNotSee(key));
                        }
                    }
                    None => {
                        for after in unread(key) {
                            graph.add(reader, *after, Why::DidNotSee(key));
                        }
                    }
                }
            }
        }
    }

    /// What returned comes before what was invoked later. A chain of instants between them keeps the
    /// edges as few as the transactions.
    fn add_real_time(&self, graph: &mut Graph<Why>) {
        #[derive(PartialEq, Eq, PartialOrd, Ord)]
        enum Event {
            // First of one instant: what returns then and what is invoked then overlap.
            Invoked(usize),
            Returned(usize),
        }
        let mut events: Vec<(Moment, Event)> = Vec::new();
        for (number, transaction) in self.happened() {
            events.push((transaction.invoked, Event::Invoked(number)));
            if let Outcome::Returned(at) = transaction.outcome {
                events.push((at, Event::Returned(number)));
            }
        }
        events.sort_unstable();
        let mut last: Option<usize> = None;
        for (_, event) in events {
            match event {
                Event::Invoked(number) => {
                    if let Some(last) = last {
                        graph.add(last, number, Why::RealTime);
                    }
                }
                Event::Returned(number) => {
                    let instant = graph.add_node();
                    graph.add(number, instant, Why::RealTime);
                    if let Some(last) = last {
                        graph.add(last, instant, Why::RealTime);
                    }
                    last = Some(instant);
                }
            }
        }
    }

    fn explain(&self, cycle: &[(usize, Why)]) -> Violation {
        let mut report =
            "each of these must come before the next, and the last before the first".to_owned();
        for (node, why) in cycle.iter().filter(|(node, _)| *node < self.history.len()) {
            let _ = write!(report, "\n  {}\n    {why}", self.name(*node));
        }
        violation(Anomaly::Cycle, report)
    }

    fn name(&self, number: usize) -> String {
        let Transaction { client, invoked, outcome, operations } = &self.history[number];
        let mut text = format!("[client {client}, {invoked} µs to ");
        let _ = match outcome {
            Outcome::Returned(at) => write!(text, "{at} µs]"),
            Outcome::Aborted => write!(text, "a rollback]"),
            Outcome::Unknown => write!(text, "an unknown end]"),
        };
        // A read of everything is long; its lists in question stand beside it.
        for operation in operations.iter().take(ELEMENTS_SHOWN) {
            let _ = match operation {
                Operation::Append { key, element } => write!(text, " append {element} to {key}"),
                Operation::Read { key, elements } => {
                    let from = elements.len().saturating_sub(ELEMENTS_SHOWN);
                    let more = if from > 0 { "… " } else { "" };
                    write!(text, " read {key}: {more}{:?}", &elements[from..])
                }
            };
        }
        if operations.len() > ELEMENTS_SHOWN {
            let _ = write!(text, " and {} more", operations.len() - ELEMENTS_SHOWN);
        }
        text
    }
}

fn reads(transaction: &Transaction) -> impl Iterator<Item = (i64, &[i64])> {
    transaction.operations.iter().filter_map(|operation| match operation {
        Operation::Read { key, elements } => Some((*key, elements.as_slice())),
        Operation::Append { .. } => None,
    })
}

#[cfg(test)]
#[path = "checker_tests.rs"]
mod tests;
