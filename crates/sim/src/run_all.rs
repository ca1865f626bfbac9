// SPDX-License-Identifier: Apache-2.0
//! Many runs on several threads, as the studies of the project's own need them.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::SimError;
use crate::outcome::Outcome;

/// The outcome of `run` for each of `jobs`, in their order. `told` receives how many of how many are done, from any
/// thread.
pub(crate) fn run_all<J: Sync>(
    jobs: &[J],
    threads: usize,
    told: &(dyn Fn(u64, u64) + Sync),
    run: impl Fn(&J) -> Result<Outcome, SimError> + Sync,
) -> Result<Vec<Outcome>, SimError> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<Result<Outcome, SimError>>>> =
        Mutex::new((0..jobs.len()).map(|_| None).collect());
    let lock = || results.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        for _thread in 0..threads.min(jobs.len()).max(1) {
            scope.spawn(|| {
                // Relaxed: the count only hands out numbers.
                while let number = next.fetch_add(1, Ordering::Relaxed)
                    && let Some(job) = jobs.get(number)
                {
                    let outcome = run(job);
                    let mut results = lock();
                    results[number] = Some(outcome);
                    let done = results.iter().flatten().count();
                    told(done as u64, jobs.len() as u64);
                }
            });
        }
    });
    lock().drain(..).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_come_in_the_order_of_the_jobs_and_the_first_error_is_told() {
        let jobs: Vec<u64> = (0..40).collect();
        let run = |job: &u64| {
            Ok(Outcome {
                requests: *job,
                ..Outcome::default()
            })
        };
        for threads in [1, 3, 100] {
            let outcomes = run_all(&jobs, threads, &|_, _| (), run).unwrap();
            let requests: Vec<u64> = outcomes.iter().map(|outcome| outcome.requests).collect();
            assert_eq!(requests, jobs);
        }
        let failed = run_all(&jobs, 2, &|_, _| (), |job| match job {
            3.. => Err(SimError::NeverEnds { iova: *job }),
            _ => run(job),
        });
        assert!(matches!(failed, Err(SimError::NeverEnds { iova: 3 })));
        assert!(run_all(&jobs[..0], 2, &|_, _| (), run).unwrap().is_empty());
    }
}
