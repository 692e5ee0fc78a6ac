//! What must come before what, and a cycle in it.

use std::collections::VecDeque;

/// Cycles are looked for from so many nodes; the shortest found is told.
const STARTS_MAX: usize = 200;

/// A directed graph whose edges say why.
#[derive(Debug)]
pub(super) struct Graph<Why> {
    edges: Vec<Vec<(usize, Why)>>,
}

impl<Why: Copy> Graph<Why> {
    pub fn new(nodes: usize) -> Graph<Why> {
        Graph { edges: (0..nodes).map(|_| Vec::new()).collect() }
    }

    pub fn add_node(&mut self) -> usize {
        self.edges.push(Vec::new());
        self.edges.len() - 1
    }

    /// `from` comes before `to`. That a node comes before itself says nothing.
    pub fn add(&mut self, from: usize, to: usize, why: Why) {
        if from != to {
            self.edges[from].push((to, why));
        }
    }

    /// A short cycle: each node, and why it comes before the next one; the last before the first.
    pub fn cycle(&self) -> Option<Vec<(usize, Why)>> {
        let left = self.without_what_comes_first();
        let mut starts = left.iter().enumerate().filter_map(|(node, left)| left.then_some(node));
        let mut shortest: Option<Vec<(usize, Why)>> = None;
        let mut tried = 0;
        // What is left need not be on a cycle itself, only behind one.
        while tried < STARTS_MAX || shortest.is_none() {
            let Some(start) = starts.next() else { break };
            tried += 1;
            if let Some(found) = self.cycle_through(start, &left)
                && shortest.as_ref().is_none_or(|shortest| found.len() < shortest.len())
            {
                shortest = Some(found);
            }
        }
        shortest
    }

    /// Which nodes are left when those that nothing comes before are taken out, again and again.
    fn without_what_comes_first(&self) -> Vec<bool> {
        let mut before = vec![0_usize; self.edges.len()];
        for (to, _) in self.edges.iter().flatten() {
            before[*to] += 1;
        }
        let mut left = vec![true; self.edges.len()];
        let mut free: Vec<usize> = (0..before.len()).filter(|node| before[*node] == 0).collect();
        while let Some(node) = free.pop() {
            left[node] = false;
            for (to, _) in &self.edges[node] {
                before[*to] -= 1;
                if before[*to] == 0 {
                    free.push(*to);
                }
            }
        }
        left
    }

    fn cycle_through(&self, start: usize, within: &[bool]) -> Option<Vec<(usize, Why)>> {
        let mut came: Vec<Option<(usize, Why)>> = vec![None; self.edges.len()];
        let mut queue = VecDeque::from([start]);
        while let Some(node) = queue.pop_front() {
            for (to, why) in self.edges[node].iter().filter(|(to, _)| within[*to]) {
                if *to == start {
                    let mut cycle = vec![(node, *why)];
                    while let Some((before, why)) = came[cycle[cycle.len() - 1].0] {
                        cycle.push((before, why));
                    }
                    cycle.reverse();
                    return Some(cycle);
                }
                if came[*to].is_none() {
                    came[*to] = Some((node, *why));
                    queue.push_back(*to);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shortest_cycle_is_found_and_none_where_there_is_none() {
        let mut graph = Graph::new(6);
        for (from, to) in [(0, 1), (1, 2), (0, 2), (2, 2), (4, 5)] {
            graph.add(from, to, ());
        }
        assert_eq!(graph.cycle(), None);
        let more = graph.add_node();
        for (from, to) in [(2, 3), (3, 4), (5, 2), (3, more), (more, 2), (4, 3)] {
            graph.add(from, to, ());
        }
        let cycle: Vec<usize> = graph.cycle().unwrap().iter().map(|(node, ())| *node).collect();
        assert_eq!(cycle, [3, 4]);
    }
}
