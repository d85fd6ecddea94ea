//! The toy device's program: the kernels' own text, and words and verbs of the toy's in place of the GPU's.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ep_conformance::verify::Compared;
use ep_core::device::Report;
use ep_cuda::build::{Source, headers};
use tempfile::TempDir;

use crate::compiler::compiler;
use crate::job::{Job, reports};
use crate::processor;

/// What is compiled.
const PROGRAM: (&str, &str) = ("program.cpp", include_str!("device/main.cpp"));
/// Its lanes between nodes, in place of the text which says that there are none.
const FAR: (&str, &str) = ("ep_far_lanes.h", include_str!("device/ep_far_lanes.h"));
/// A program ends by itself: all waits of its ranks have deadlines.
const LONGEST: Duration = Duration::from_secs(200);

/// Whether kernels are those for tests.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checks {
    On,
    Off,
}

/// Whether kernels have lanes between nodes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Nodes {
    One,
    /// Over the toy's own network.
    Several,
    /// As kernels post to adapters themselves: a library, whose caller makes the lanes.
    Adapters,
}

/// A change of the kernels' text, made on purpose: file, what stands there, what is put in its place.
pub(crate) type Mutation = (&'static str, &'static str, &'static str);

/// What the compiler says of the kernels' text with one change that it must refuse. None where there is no compiler.
pub(crate) fn refusal(mutation: Mutation) -> Option<String> {
    let compiler = compiler()?;
    Some(
        compile(&compiler, Checks::Off, Nodes::One, Some(mutation))
            .err()
            .unwrap_or_else(|| panic!("it compiles: {mutation:?}")),
    )
}

/// The files of the program by name: the kernels' own, and the program's.
fn files(nodes: Nodes) -> Vec<(&'static str, String)> {
    let kernels = [Source::Counts, Source::DispatchRing, Source::CombineRing, Source::OfferNone];
    let kernels =
        kernels.map(|source| (source.name().rsplit('/').next().unwrap_or_default(), source.text().to_owned()));
    let own = [(PROGRAM.0, PROGRAM.1.to_owned())];
    // Later files take the place of earlier ones.
    let far = match nodes {
        Nodes::One => None,
        Nodes::Several => Some((FAR.0, FAR.1.to_owned())),
        Nodes::Adapters => Some((FAR.0, ep_ibgda::source(&ep_ibgda::Settings::new()).text)),
    };
    headers().into_iter().chain(kernels).chain(own).chain(far).collect()
}

/// A program, or what the compiler says.
fn compile(compiler: &str, checks: Checks, nodes: Nodes, mutation: Option<Mutation>) -> Result<Program, String> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for (name, mut text) in files(nodes).into_iter().filter(|(name, _)| !processor::has(name)) {
        if let Some((_, from, to)) = mutation.filter(|(file, ..)| *file == name) {
            assert_eq!(text.matches(from).count(), 1, "{name} has it once: {from}");
            text = text.replace(from, to);
        }
        fs::write(folder.path().join(name), text).expect("the file can be written");
    }
    let mut command = processor::compiler_in(folder.path(), compiler);
    // A word or verb that the toy lacks is declared and not defined: that is warned of.
    command.args(["-Wunused-function", "-Werror"]);
    command.args((checks == Checks::On).then_some("-DEP_TEST=1"));
    if nodes == Nodes::Adapters {
        let defines = ep_ibgda::source(&ep_ibgda::Settings::new()).defines;
        command.args(["-shared", "-DTOY_LIBRARY"]);
        command.args(defines.iter().map(|(name, value)| format!("-D{name}={value}")));
    }
    command.args(["-o", "program", "program.cpp"]);
    let said = command.output().expect("the compiler runs");
    match said.status.success() {
        true => Ok(Program(folder)),
        false => Err(String::from_utf8_lossy(&said.stderr).into_owned()),
    }
}

/// A compiled program, in a folder of its own.
#[derive(Debug)]
pub(crate) struct Program(TempDir);

impl Program {
    /// Compiles the kernels' text, as it is or with one change. None where there is no compiler.
    pub(crate) fn new(checks: Checks, nodes: Nodes, mutation: Option<Mutation>) -> Option<Self> {
        let compiler = compiler()?;
        Some(compile(&compiler, checks, nodes, mutation).unwrap_or_else(|said| panic!("{compiler}: {said}")))
    }

    /// Runs a job, and holds what comes of it against the oracle.
    pub(crate) fn run(&self, job: &Job) -> Result<Compared, String> {
        job.verify(&self.results(job)?)
    }

    /// Runs a job that fails: what its ranks reported.
    pub(crate) fn reports(&self, job: &Job) -> Result<Vec<Report>, String> {
        reports(&mut &self.results(job)?[..])
    }

    /// Its folder.
    pub(crate) fn folder(&self) -> &Path {
        self.0.path()
    }

    /// What the program writes.
    fn results(&self, job: &Job) -> Result<Vec<u8>, String> {
        let at = |name| self.0.path().join(name);
        let problem = |error: std::io::Error| error.to_string();
        fs::write(at("job"), job.bytes()).map_err(problem)?;
        let (status, said) = self.execute(&at("job"), &at("results"), &at("errors")).map_err(problem)?;
        match status {
            Some(status) if status.success() => fs::read(at("results")).map_err(problem),
            Some(status) => Err(format!("{status}: {said}")),
            None => Err(format!("no end after {LONGEST:?}: {said}")),
        }
    }

    /// How the program ended, none where it did not, and what it said.
    fn execute(&self, job: &Path, results: &Path, errors: &Path) -> std::io::Result<(Option<ExitStatus>, String)> {
        let mut program = Command::new(self.0.path().join("program"))
            .stdin(fs::File::open(job)?)
            .stdout(fs::File::create(results)?)
            .stderr(Stdio::from(fs::File::create(errors)?))
            .spawn()?;
        let began = Instant::now();
        let status = loop {
            if let Some(status) = program.try_wait()? {
                break Some(status);
            }
            if began.elapsed() > LONGEST {
                program.kill()?;
                program.wait()?;
                break None;
            }
            thread::sleep(Duration::from_millis(5));
        };
        Ok((status, fs::read_to_string(errors)?))
    }
}
