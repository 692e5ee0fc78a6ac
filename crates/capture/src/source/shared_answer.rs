//! One answer for all who ask the same thing at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use tokio::sync::Mutex;

/// When somebody came to ask.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrival(u64);

impl Arrival {
    /// Before anybody asked anything: the first answer there is will do.
    pub const FIRST: Arrival = Arrival(0);
}

/// A question that many ask. Whoever asks gets the answer to one that was *begun after he came*, so
/// that nobody is told anything older than he would have found out himself; those that wait while
/// one is under way share the next. An error is only for whom it met: those that waited for that
/// answer ask for themselves then, side by side.
#[derive(Debug)]
pub struct SharedAnswer<T> {
    begun: AtomicU64,
    waiting: AtomicUsize,
    last: Mutex<Last<T>>,
}

#[derive(Debug)]
struct Last<T> {
    /// Which question was the last that ended; they are counted from 1.
    number: u64,
    /// Its answer, if there was one, kept only while somebody waits for it.
    answer: Option<Arc<T>>,
}

impl<T> Default for SharedAnswer<T> {
    fn default() -> Self {
        SharedAnswer {
            begun: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            last: Mutex::new(Last { number: 0, answer: None }),
        }
    }
}

impl<T> SharedAnswer<T> {
    /// The answer to `ask`, or to another's `ask` that began after this call. May be dropped at any
    /// await; a question that is dropped is asked by the next.
    pub async fn get<E>(&self, ask: impl Future<Output = Result<T, E>>) -> Result<Arc<T>, E> {
        self.get_since(self.arrive(), ask).await
    }

    /// Somebody comes now.
    pub fn arrive(&self) -> Arrival {
        Arrival(self.begun.load(Ordering::SeqCst))
    }

    /// As [`SharedAnswer::get`], for somebody who came at `arrival`.
    pub async fn get_since<E>(
        &self,
        Arrival(begun_before): Arrival,
        ask: impl Future<Output = Result<T, E>>,
    ) -> Result<Arc<T>, E> {
        let waiting = Waiting::of(&self.waiting);
        let mut last = self.last.lock().await;
        if last.number > begun_before {
            let Some(answer) = last.answer.clone() else {
                drop(last);
                return ask.await.map(Arc::new);
            };
            // While the answer is locked, so that the last of those who waited is the last.
            drop(waiting);
            if self.waiting.load(Ordering::SeqCst) == 0 {
                last.answer = None;
            }
            return Ok(answer);
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let answer = ask.await.map(Arc::new);
        drop(waiting);
        let is_awaited = self.waiting.load(Ordering::SeqCst) > 0;
        *last = Last { number, answer: answer.as_ref().ok().filter(|_| is_awaited).cloned() };
        answer
    }
}

struct Waiting<'a>(&'a AtomicUsize);

impl<'a> Waiting<'a> {
    fn of(count: &'a AtomicUsize) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Waiting(count)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use tokio::sync::Semaphore;

    /// Eight ask at once: the first for himself, and one more for the seven that came meanwhile.
    #[tokio::test]
    async fn those_who_come_while_one_is_asked_share_the_next() {
        let shared = Arc::new(SharedAnswer::<u64>::default());
        let asked = Arc::new(AtomicU64::new(0));
        let go_on = Arc::new(Semaphore::new(0));
        let ask = || {
            let (shared, asked, go_on) = (shared.clone(), asked.clone(), go_on.clone());
            tokio::spawn(async move {
                let question = async {
                    let number = asked.fetch_add(1, Ordering::SeqCst) + 1;
                    go_on.acquire().await.map(tokio::sync::SemaphorePermit::forget).ok();
                    Ok::<u64, Infallible>(number)
                };
                shared.get(question).await.map_or(0, |answer| *answer)
            })
        };
        let first = ask();
        while asked.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        let others: Vec<_> = (0..7).map(|_| ask()).collect();
        while shared.waiting.load(Ordering::SeqCst) < 8 {
            tokio::task::yield_now().await;
        }
        go_on.add_permits(8);
        assert_eq!(first.await.ok(), Some(1));
        for other in others {
            assert_eq!(other.await.ok(), Some(2));
        }
        assert_eq!(asked.load(Ordering::SeqCst), 2);
        assert!(shared.last.lock().await.answer.is_none(), "nobody waits for it any more");
        assert_eq!(ask().await.ok(), Some(3), "an answer from before is not given");
    }

    #[tokio::test]
    async fn an_error_and_a_dropped_question_are_nobody_elses() {
        let shared = SharedAnswer::<u64>::default();
        assert_eq!(shared.get(async { Err::<u64, &str>("away") }).await, Err("away"));
        let dropped = shared.get(std::future::pending::<Result<u64, &str>>());
        let cut_off = tokio::time::timeout(std::time::Duration::ZERO, dropped).await;
        assert!(cut_off.is_err());
        assert_eq!(shared.get(async { Ok::<u64, &str>(3) }).await, Ok(Arc::new(3)));
    }
}
