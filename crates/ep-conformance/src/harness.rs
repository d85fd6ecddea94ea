//! Runs the suite of a backend as a test binary: named cases, filters, skips with their reason, a time limit each.

use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};

use crate::any::AnyOf;
use crate::backend::{Backend, Requirement};
use crate::cases;
use crate::processes::{self, InProcesses, Pool, Processes};

/// How long one case may take, times `EP_TIME_FACTOR` from the environment (for slow machines).
const CASE_LIMIT: Duration = Duration::from_secs(900);

/// One case of the suite.
pub(crate) struct Case<B> {
    /// Named after the rule that it proves.
    pub(crate) name: &'static str,
    /// What it needs beyond the contract's minimum.
    pub(crate) needs: &'static [Requirement],
    /// Runs it; the error says what was wrong and how to see it again.
    pub(crate) body: fn(&B) -> Result<(), String>,
}

impl<B> std::fmt::Debug for Case<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Case").field("name", &self.name).field("needs", &self.needs).finish_non_exhaustive()
    }
}

/// Runs the case of that name on `backend`, for tests of one's own.
///
/// # Errors
/// What was wrong; and where no case has that name.
pub fn run_case<B: Backend>(name: &str, backend: B) -> Result<(), String> {
    let case = cases::all().into_iter().find(|case| case.name == name);
    (case.ok_or_else(|| format!("no case is called {name}"))?.body)(&AnyOf::new(backend))
}

/// The cases of some names on `backend`, as tests called `NAME::...`, with the limit of the suite's and skipped as those are. One fails for a name that
/// no case has.
pub fn some<B: Backend>(name: &str, cases: &[&'static str], backend: B) -> Vec<Trial> {
    let (prefix, backend) = (format!("{name}::"), AnyOf::new(backend));
    let all = cases::all();
    let missing = cases.iter().filter(|&&name| all.iter().all(|case| case.name != name));
    let missing = missing.map(|name| {
        let name = name.to_owned();
        Trial::test(format!("{prefix}{name}"), move || Err(format!("no case is called {name}").into()))
    });
    let mut trials: Vec<Trial> = missing.collect();
    trials.extend(all.into_iter().filter(|case| cases.contains(&case.name)).map(|case| trial(&prefix, &backend, case)));
    trials
}

/// Runs `body` as a test of a backend's own, with the limit of a case; skipped where `absent` says why.
pub fn limited(
    name: String,
    absent: Option<&'static str>,
    body: impl FnOnce() -> Result<(), String> + Send + 'static,
) -> Trial {
    skip_or(absent, name, move || within(time_limit(), body))
}

/// Runs all cases on `backend`. Cases that it cannot run are counted as ignored; their kind says what is missing.
pub fn main<B: Backend>(backend: B) -> ExitCode {
    run(trials("", backend))
}

/// The suite on several backends in one test binary.
#[derive(Default, Debug)]
pub struct Suite(Vec<Trial>);

impl Suite {
    /// With all cases on one backend more, called `NAME::...`.
    #[must_use]
    pub fn on<B: Backend>(mut self, name: &str, backend: B) -> Self {
        self.0.extend(trials(&format!("{name}::"), backend));
        self
    }

    /// With those cases on one backend more that need `what`, called `NAME::...`.
    #[must_use]
    pub fn on_those<B: Backend>(mut self, name: &str, what: Requirement, backend: B) -> Self {
        let (prefix, backend) = (format!("{name}::"), AnyOf::new(backend));
        let those = cases::all().into_iter().filter(|case| case.needs.contains(&what));
        self.0.extend(those.map(|case| trial(&prefix, &backend, case)));
        self
    }

    /// With tests of one's own.
    #[must_use]
    pub fn with(mut self, trials: Vec<Trial>) -> Self {
        self.0.extend(trials);
        self
    }

    /// Of what it has so far, with those alone whose names `takes` holds for.
    #[must_use]
    pub fn only(mut self, takes: impl Fn(&str) -> bool) -> Self {
        self.0.retain(|trial| takes(trial.name()));
        self
    }

    /// Of what it has so far, a run that is not [thorough] runs those alone whose names `takes` holds for. The others are counted as ignored, and
    /// say why.
    #[must_use]
    pub fn share(mut self, takes: impl Fn(&str) -> bool) -> Self {
        if !thorough() {
            self.0 = self.0.into_iter().map(|trial| if takes(trial.name()) { trial } else { left(trial) }).collect();
        }
        self
    }

    /// Runs all cases, as [`main`] does.
    pub fn run(self) -> ExitCode {
        run(self.0)
    }

    /// Runs all cases, then all cases again, called `processes::...`, with ranks that are processes of this program.
    pub fn run_with_processes<P: Processes>(self, processes: P) -> ExitCode {
        self.run_with_processes_for(processes, |_| true)
    }

    /// The same where only cases of some names are run with processes.
    pub fn run_with_processes_for<P: Processes>(self, processes: P, takes: impl Fn(&str) -> bool) -> ExitCode {
        self.run_with_processes_of(processes, |name, _| takes(name))
    }

    /// The same where only cases that need `what` are run with processes.
    pub fn run_with_processes_on_those<P: Processes>(self, processes: P, what: Requirement) -> ExitCode {
        self.run_with_processes_of(processes, |_, needs| needs.contains(&what))
    }

    fn run_with_processes_of<P: Processes>(
        mut self,
        processes: P,
        takes: impl Fn(&str, &[Requirement]) -> bool,
    ) -> ExitCode {
        if processes::is_rank() {
            return processes::serve(processes);
        }
        let apart = AnyOf::new(InProcesses { backend: processes, session: None });
        let pool = Arc::new(Pool::default());
        let taken = cases::all().into_iter().filter(|case| takes(case.name, case.needs));
        self.0.extend(taken.map(|case| trial_in_processes(&apart, &pool, &case)));
        self.run()
    }
}

/// In place of a case that only a thorough run runs. One that is ignored anyway keeps its reason.
fn left(trial: Trial) -> Trial {
    if trial.has_ignored_flag() {
        return trial;
    }
    const REASON: &str = "EP_THOROUGH=1 runs it";
    skip_or(Some(REASON), trial.name().to_owned(), || Ok(()))
}

fn run(trials: Vec<Trial>) -> ExitCode {
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// All cases on `backend`; their names begin with `prefix`.
fn trials<B: Backend>(prefix: &str, backend: B) -> Vec<Trial> {
    let backend = AnyOf::new(backend);
    cases::all().into_iter().map(|case| trial(prefix, &backend, case)).collect()
}

/// As [`main`]; then all cases again, called `processes::...`, with ranks that are processes of this program.
pub fn main_with_processes<B: Backend, P: Processes>(
    threads: impl FnOnce() -> B,
    processes: impl FnOnce() -> P,
) -> ExitCode {
    if processes::is_rank() {
        return processes::serve(processes());
    }
    Suite(trials("", threads())).run_with_processes(processes())
}

fn trial_in_processes<B: Backend>(apart: &B, pool: &Arc<Pool>, case: &Case<B>) -> Trial {
    let lack = lack(apart, case);
    let (pool, name) = (Arc::clone(pool), case.name);
    skip_or(lack, format!("processes::{name}"), move || pool.run(name, time_limit()).map_err(Failed::from))
}

fn trial<B: Backend + Clone>(prefix: &str, backend: &B, case: Case<B>) -> Trial {
    let lack = lack(backend, &case);
    let backend = backend.clone();
    skip_or(lack, format!("{prefix}{}", case.name), move || within(time_limit(), move || (case.body)(&backend)))
}

/// Why a case cannot run.
fn lack<B: Backend>(backend: &B, case: &Case<B>) -> Option<&'static str> {
    backend.absent().or_else(|| case.needs.iter().find_map(|&need| backend.lacks(need)))
}

fn skip_or(
    lack: Option<&'static str>,
    name: String,
    run: impl FnOnce() -> Result<(), Failed> + Send + 'static,
) -> Trial {
    match lack {
        // Whoever insists on running ignored tests hears the reason too: a case that cannot run must never pass.
        Some(reason) => Trial::test(name, move || Err(reason.into()))
            .with_kind(format!("skipped: {reason}"))
            .with_ignored_flag(true),
        None => Trial::test(name, run),
    }
}

fn time_limit() -> Duration {
    CASE_LIMIT * env_number("EP_TIME_FACTOR").unwrap_or(1)
}

/// Whether tests take their time: `EP_THOROUGH=1`, as CI sets it for its campaigns. Otherwise a part of what is drawn, or tried one by
/// one, has to do, so that `cargo test` ends in minutes.
pub fn thorough() -> bool {
    env_number("EP_THOROUGH").is_some_and(|asked| asked > 0)
}

/// Of what is drawn, or tried one by one: `all` in a [thorough] run, else `some`.
pub fn share<T>(all: T, some: T) -> T {
    if thorough() { all } else { some }
}

/// A number from the environment.
///
/// # Panics
/// When it is set to something else: a campaign that quietly ran with the default would pass for the one asked for.
pub(crate) fn env_number(name: &str) -> Option<u32> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is `{value}`, expected a number below 2^32")))
}

/// Runs `body` on a thread of its own. One that does not end is left behind: the process ends soon after.
fn within(limit: Duration, body: impl FnOnce() -> Result<(), String> + Send + 'static) -> Result<(), Failed> {
    let (done, result) = mpsc::channel();
    let worker = thread::spawn(move || done.send(body()));
    match result.recv_timeout(limit) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(message)) => Err(message.into()),
        Err(mpsc::RecvTimeoutError::Timeout) => Err(format!("not done within {limit:?}").into()),
        Err(mpsc::RecvTimeoutError::Disconnected) => match worker.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(_) => Err("the case ended without a result".into()),
        },
    }
}
