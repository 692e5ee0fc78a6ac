//! One agent's switch: paused, held for a moment, or started again, while the node runs.

use std::future::Future;
use std::time::Duration;
use tokio::sync::{Mutex, MutexGuard, watch};

/// What an agent is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Wanted {
    /// Until somebody resumes it.
    paused: bool,
    /// While something is changed behind its back.
    held: bool,
    /// An agent that ended by itself goes on when this is another number.
    round: u64,
}

impl Wanted {
    fn runs(self) -> bool {
        !self.paused && !self.held
    }
}

/// Starts and halts one agent.
#[derive(Debug)]
pub struct Switch {
    wanted: watch::Sender<Wanted>,
    running: watch::Sender<bool>,
    /// One operator at a time.
    operator: Mutex<()>,
}

/// An agent that is halted, until this is dropped.
pub struct Held<'a> {
    switch: &'a Switch,
    _operator: MutexGuard<'a, ()>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.switch.wanted.send_modify(|wanted| wanted.held = false);
    }
}

impl Switch {
    /// An agent that is to run, or to stay paused.
    pub fn new(paused: bool) -> Switch {
        Switch {
            wanted: watch::channel(Wanted { paused, ..Wanted::default() }).0,
            running: watch::channel(false).0,
            operator: Mutex::new(()),
        }
    }

    /// Whether it is paused.
    pub fn is_paused(&self) -> bool {
        self.wanted.borrow().paused
    }

    /// Halts it until it is resumed, and waits until it has come to rest. `note` makes that durable,
    /// first: a crash must not resume what somebody believes paused. And in one turn with it: of two
    /// operators at once the later one has the last word in both.
    ///
    /// # Errors
    /// What `note` fails with; then nothing is changed.
    pub async fn pause<E>(&self, note: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let _operator = self.operator.lock().await;
        note()?;
        self.wanted.send_modify(|wanted| wanted.paused = true);
        self.at_rest().await;
        Ok(())
    }

    /// Lets it run, also if it ended by itself. `note` is as for [`Switch::pause`].
    ///
    /// # Errors
    /// As [`Switch::pause`].
    pub async fn resume<E>(&self, note: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let _operator = self.operator.lock().await;
        note()?;
        self.start_again();
        Ok(())
    }

    /// Halts it for as long as the answer lives, and waits until it has come to rest.
    pub async fn hold(&self) -> Held<'_> {
        let held = self.begin_to_hold().await;
        self.at_rest().await;
        held
    }

    /// As [`Switch::hold`], and gives up when it has not come to rest within `patience`; `None`
    /// then, and it goes on. For another operator it waits in any case.
    pub async fn hold_within(&self, patience: Duration) -> Option<Held<'_>> {
        let held = self.begin_to_hold().await;
        tokio::time::timeout(patience, self.at_rest()).await.ok()?;
        Some(held)
    }

    async fn begin_to_hold(&self) -> Held<'_> {
        let operator = self.operator.lock().await;
        self.wanted.send_modify(|wanted| wanted.held = true);
        Held { switch: self, _operator: operator }
    }

    fn start_again(&self) {
        self.wanted.send_modify(|wanted| {
            wanted.paused = false;
            wanted.round += 1;
        });
    }

    async fn at_rest(&self) {
        let mut running = self.running.subscribe();
        // The sender lives as long as we do.
        let _ = running.wait_for(|running| !running).await;
    }

    /// Runs `agent` whenever it is to run, until `stop` turns true. The agent gets a signal that
    /// tells it to come to rest.
    pub async fn keep<F, Fut>(&self, mut stop: watch::Receiver<bool>, agent: F)
    where
        F: Fn(watch::Receiver<bool>) -> Fut,
        Fut: Future<Output = ()>,
    {
        let mut wanted = self.wanted.subscribe();
        loop {
            let round = tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                wanted = wanted.wait_for(|wanted| wanted.runs()) => match wanted {
                    Ok(wanted) => wanted.round,
                    Err(_) => return,
                },
            };
            let (halt, halted) = watch::channel(false);
            self.running.send_replace(true);
            // Whoever halts us says so first and looks whether we run afterwards.
            if !self.wanted.borrow().runs() {
                self.running.send_replace(false);
                continue;
            }
            let halts = {
                let mut work = std::pin::pin!(agent(halted));
                let ended_by_itself = tokio::select! {
                    () = &mut work => true,
                    _ = stop.wait_for(|stop| *stop) => false,
                    _ = wanted.wait_for(|wanted| !wanted.runs() || wanted.round != round) => false,
                };
                if !ended_by_itself {
                    halt.send_replace(true);
                    work.await;
                }
                !ended_by_itself
            };
            self.running.send_replace(false);
            if halts {
                continue;
            }
            tokio::select! {
                _ = stop.wait_for(|stop| *stop) => return,
                wanted = wanted.wait_for(|wanted| wanted.round != round) => {
                    if wanted.is_err() {
                        return;
                    }
                }
            }
        }
    }
}

impl Held<'_> {
    /// Lets the agent run again although it had ended by itself (unless it is paused).
    pub fn go_on(self) {
        self.switch.wanted.send_modify(|wanted| wanted.round += 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    fn nothing() -> Result<(), String> {
        Ok(())
    }

    /// On the page and by the verb, at once.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn of_two_operators_the_later_one_has_the_last_word_in_the_note_too() {
        let switch = Arc::new(Switch::new(false));
        let noted = Arc::new(std::sync::Mutex::new(false));
        let note = |paused: bool| {
            let noted = noted.clone();
            move || {
                *noted.lock().unwrap() = paused;
                std::thread::yield_now();
                nothing()
            }
        };
        for round in 0..1_000 {
            let (pausing, resuming) = (switch.clone(), switch.clone());
            let (paused, resumed) = (note(true), note(false));
            let pausing = tokio::spawn(async move { pausing.pause(paused).await });
            let resuming = tokio::spawn(async move { resuming.resume(resumed).await });
            pausing.await.unwrap().unwrap();
            resuming.await.unwrap().unwrap();
            assert_eq!(switch.is_paused(), *noted.lock().unwrap(), "{round}");
        }
        let before = switch.is_paused();
        switch.pause(|| Err(())).await.unwrap_err();
        switch.resume(|| Err(())).await.unwrap_err();
        assert_eq!(switch.is_paused(), before);
    }

    /// Counts its runs; ends by itself at once, or when told to.
    fn agent(
        switch: Arc<Switch>,
        ends: bool,
    ) -> (Arc<AtomicU64>, watch::Sender<bool>, tokio::task::JoinHandle<()>) {
        let runs = Arc::new(AtomicU64::new(0));
        let (stop, stopped) = watch::channel(false);
        let counted = runs.clone();
        let task = tokio::spawn(async move {
            let run = |mut halted: watch::Receiver<bool>| {
                counted.fetch_add(1, Ordering::SeqCst);
                async move {
                    if !ends {
                        let _ = halted.wait_for(|halted| *halted).await;
                    }
                }
            };
            switch.keep(stopped, run).await;
        });
        (runs, stop, task)
    }

    async fn until(runs: &AtomicU64, wanted: u64) {
        while runs.load(Ordering::SeqCst) < wanted {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn one_that_does_not_come_to_rest_is_given_up_and_goes_on() {
        let switch = Arc::new(Switch::new(false));
        let kept = switch.clone();
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(async move {
            // Whatever it is told, while the disk does not answer.
            kept.keep(stopped, |_| std::future::pending()).await;
        });
        switch.running.subscribe().wait_for(|running| *running).await.unwrap();
        assert!(switch.hold_within(Duration::from_millis(20)).await.is_none());
        assert!(switch.wanted.borrow().runs());
        task.abort();
        drop(stop);
    }

    #[tokio::test]
    async fn an_agent_rests_while_it_is_paused_or_held() {
        let switch = Arc::new(Switch::new(true));
        let (runs, stop, task) = agent(switch.clone(), false);
        switch.pause(nothing).await.unwrap();
        assert_eq!(runs.load(Ordering::SeqCst), 0);
        switch.resume(nothing).await.unwrap();
        until(&runs, 1).await;
        let held = switch.hold().await;
        assert!(!*switch.running.borrow());
        drop(held);
        until(&runs, 2).await;
        switch.pause(nothing).await.unwrap();
        // A pause outlives what somebody else does meanwhile.
        switch.hold().await.go_on();
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(runs.load(Ordering::SeqCst), 2);
        stop.send_replace(true);
        task.await.unwrap();
    }

    #[tokio::test]
    async fn an_agent_that_ended_goes_on_only_when_it_is_told_to() {
        let switch = Arc::new(Switch::new(false));
        let (runs, stop, task) = agent(switch.clone(), true);
        until(&runs, 1).await;
        drop(switch.hold().await);
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        assert_eq!(runs.load(Ordering::SeqCst), 1);
        switch.hold().await.go_on();
        until(&runs, 2).await;
        switch.resume(nothing).await.unwrap();
        until(&runs, 3).await;
        stop.send_replace(true);
        task.await.unwrap();
    }
}
