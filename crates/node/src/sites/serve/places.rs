//! Which node has a site's place.
//!
//! A node that asks for a site's log ends the session that the site had of it: mostly it is the same
//! node, which lost touch, or the one that was started in its place. Where two run with one site's
//! certificate (a machine that was copied), each would end the other's sessions without end, and log
//! would be dropped that the one has and the other lacks.
//!
//! Each start of a node has a number. One whose place another took, and that asks again while that
//! other one is there, shows that both run. Then who has the place keeps it.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// So many starts of a site's node are remembered which have lost its place.
const REPLACED_MAX: usize = 16;

/// A second node is told of for so long after it asked last; it asks every few seconds.
const SECOND_TOLD_FOR: Duration = Duration::from_secs(60);

/// Who has the place of which site.
#[derive(Debug, Default)]
pub(super) struct Places(Mutex<HashMap<String, Holder>>);

#[derive(Debug)]
struct Holder {
    start: u64,
    from: IpAddr,
    /// Its sessions that are open.
    open: usize,
    /// Starts that had the place before.
    replaced: VecDeque<u64>,
    /// When another one that runs asked last, and what it was told.
    second: Option<(Instant, String)>,
}

/// A session of who has a site's place.
#[derive(Debug)]
pub(super) struct Place<'a> {
    places: &'a Places,
    site: String,
    start: u64,
}

impl Places {
    /// For as long as what is returned is kept, this start of the site's node has its place.
    ///
    /// # Errors
    /// Why not: a node that it does not take the place of is there.
    pub fn take(
        &self,
        site: &str,
        (start, from): (u64, IpAddr),
        now: Instant,
    ) -> Result<Place<'_>, String> {
        let mut all = self.lock();
        let holder = all.entry(site.to_owned()).or_insert_with(|| Holder {
            start,
            from,
            open: 0,
            replaced: VecDeque::new(),
            second: None,
        });
        if holder.start != start {
            if holder.open > 0 && holder.replaced.contains(&start) {
                let why = format!(
                    "two nodes run as site \"{site}\": the one at {} has its place, and the one at \
                     {from}, which had it before, gets nothing. Stop the one that is not meant to \
                     be. If both are, the second is a site of its own: another [site] name with a \
                     certificate of that name (farshore site-cert), a [downstream.NAME] at its \
                     upstream site, and an empty data_dir",
                    holder.from
                );
                holder.second = Some((now, why.clone()));
                return Err(why);
            }
            holder.replaced.retain(|replaced| *replaced != start);
            if holder.replaced.len() == REPLACED_MAX {
                holder.replaced.pop_front();
            }
            holder.replaced.push_back(holder.start);
            (holder.start, holder.open, holder.second) = (start, 0, None);
        }
        holder.from = from;
        holder.open += 1;
        Ok(Place { places: self, site: site.to_owned(), start })
    }

    /// What a second node that runs as this site was told a moment ago.
    pub fn second(&self, site: &str, now: Instant) -> Option<String> {
        let all = self.lock();
        let (at, why) = all.get(site)?.second.as_ref()?;
        (now.saturating_duration_since(*at) < SECOND_TOLD_FOR).then(|| why.clone())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Holder>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if let Some(holder) = self.places.lock().get_mut(&self.site)
            && holder.start == self.start
        {
            holder.open = holder.open.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[test]
    fn of_two_nodes_that_run_the_one_that_has_the_place_keeps_it() {
        let (places, begin) = (Places::default(), Instant::now());
        let first = places.take("a", (1, HERE), begin).unwrap();
        // It may have been started anew: whoever comes takes over.
        let second = places.take("a", (2, HERE), begin).unwrap();
        drop(first);
        let refused = places.take("a", (1, HERE), begin).unwrap_err();
        assert!(refused.starts_with("two nodes run as site \"a\": "), "{refused}");
        assert_eq!(places.second("a", begin), Some(refused));
        assert_eq!(places.second("a", begin + SECOND_TOLD_FOR), None);
        // Another log of the same node, and the same one once it lost touch.
        let more = [2, 2].map(|start| places.take("a", (start, HERE), begin).unwrap());
        drop(second);
        assert!(places.take("a", (1, HERE), begin).is_err());
        drop(more);
        // Nobody is there.
        let first = places.take("a", (1, HERE), begin).unwrap();
        assert_eq!(places.second("a", begin), None);
        assert!(places.take("a", (2, HERE), begin).is_err());
        drop(first);
        places.take("b", (2, HERE), begin).unwrap();
    }

    #[test]
    fn a_node_that_is_started_again_and_again_has_its_place() {
        let (places, now) = (Places::default(), Instant::now());
        let mut last = None;
        for start in 0..1_000 {
            // What the one before had open may be found dead much later.
            last =
                Some((places.take("a", (start, HERE), now).unwrap(), last.map(|(place, _)| place)));
        }
        assert!(places.take("a", (998, HERE), now).is_err());
        drop(last);
        assert!(places.lock()["a"].replaced.len() <= REPLACED_MAX);
        places.take("a", (998, HERE), now).unwrap();
    }
}
