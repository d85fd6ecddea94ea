//! The output of all processes, line by line, with the rank in front.

use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, IsTerminal, PipeReader, Read, Write};
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::signals;

/// A longer line is printed in parts.
const LONGEST_LINE: u64 = 1 << 20;

/// How long the last output may take once all processes have ended, not counting the time that lines wait for their reader:
/// only what escaped from its process group could still hold it open.
const LAST_LINES: Duration = Duration::from_secs(1);
/// The same counting that time, where something has escaped: its lines are waited for no longer than those of the job before them.
const ESCAPED: Duration = Duration::from_secs(10);
/// How long a line may wait for its reader once all processes have ended. Who reads page by page takes such time.
pub(super) const READER: Duration = Duration::from_secs(600);
/// The same where a signal ended them: whoever sent it waits.
pub(super) const READER_OF_LAST_WORDS: Duration = Duration::from_secs(5);
/// More than a pipe, and what reads it, hold: bytes behind that were written after all processes had ended.
const HELD: usize = 2 << 20;
/// Time between two looks at what is being printed.
const POLL: Duration = Duration::from_millis(10);

/// Which output of a process, and of this command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stream {
    Out,
    Err,
}

impl Stream {
    fn is_coloured(self) -> bool {
        let terminal = match self {
            Self::Out => io::stdout().is_terminal(),
            Self::Err => io::stderr().is_terminal(),
        };
        terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    /// Prints a whole line at once: standard streams are locked for as long as a write takes.
    fn print(self, line: &[u8]) -> io::Result<()> {
        match self {
            Self::Out => write_whole(&mut io::stdout().lock(), line),
            Self::Err => write_whole(&mut io::stderr().lock(), line),
        }
    }
}

/// Writes all of a line. A stream that takes no more for now, as whoever shares it has made it non-blocking, has a reader all the same.
fn write_whole(to: &mut impl Write, mut line: &[u8]) -> io::Result<()> {
    let full = |error: &io::Error| error.kind() == io::ErrorKind::WouldBlock;
    while !line.is_empty() {
        match to.write(line) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => line = &line[written..],
            Err(error) if full(&error) => thread::sleep(POLL),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    while let Err(error) = to.flush() {
        if !full(&error) {
            return Err(error);
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// What processes have said of errors: lines that begin so, and those that follow.
const ERROR: &[u8] = b"error: ";
/// Lines that are remembered. One that is forgotten may be printed again.
const REMEMBERED: usize = 1000;

/// Errors that processes have said. Bad arguments are found by all of them: what one has said, the others do not say again.
#[derive(Clone, Default)]
struct Errors(Arc<Mutex<HashSet<Vec<u8>>>>);

impl Errors {
    /// Those of one more process.
    fn of_process(&self) -> ErrorsOfOne {
        ErrorsOfOne { said: self.clone(), begun: false, repeating: false }
    }

    /// Whether nobody has said a line before, or too much was said to know.
    fn is_new(&self, line: &[u8]) -> bool {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() < REMEMBERED { said.insert(line.to_vec()) } else { !said.contains(line) }
    }
}

/// Where one process is in what it says of errors.
struct ErrorsOfOne {
    said: Errors,
    /// It has said one.
    begun: bool,
    /// It says one that another process has said, and has added nothing to it.
    repeating: bool,
}

impl ErrorsOfOne {
    /// Whether the next line was said by another process, and belongs to an error.
    fn repeats(&mut self, line: &[u8]) -> bool {
        let begins = line.starts_with(ERROR);
        self.begun |= begins;
        if !self.begun {
            return false;
        }
        let known = !self.said.is_new(line);
        self.repeating = known && (begins || self.repeating);
        self.repeating
    }
}

/// Why lines were not printed: their reader is gone, or too slow for whoever ended this command.
const UNREAD: &str = "nobody reads the output any more";

/// What threads that print have come to.
#[derive(Default)]
struct Progress {
    /// Lines that were to be printed, and those of them that were: a slow reader may hold them up.
    begun: AtomicU64,
    printed: AtomicU64,
    /// Why a line could not be printed, the first of them.
    unread: OnceLock<String>,
    /// All processes have ended.
    ended: AtomicBool,
}

impl Progress {
    fn print(&self, stream: Stream, line: &[u8]) {
        self.begun.fetch_add(1, Ordering::Relaxed);
        if let Err(error) = stream.print(line) {
            let _ = self.unread.set(match error.kind() {
                io::ErrorKind::BrokenPipe => UNREAD.to_owned(),
                _ => format!("the output cannot be written: {error}"),
            });
        }
        self.printed.fetch_add(1, Ordering::Relaxed);
    }

    fn printed(&self) -> u64 {
        self.printed.load(Ordering::Relaxed)
    }

    /// Whether a line waits for its reader.
    fn is_printing(&self) -> bool {
        self.begun.load(Ordering::Relaxed) != self.printed()
    }
}

/// Prints the output of all processes.
pub(super) struct Printer {
    errors: Errors,
    /// Characters of the highest rank.
    width: usize,
    progress: Arc<Progress>,
    /// Those that have not come to their end.
    pipes: Vec<Weak<PipeReader>>,
    /// Dropped by each thread that has read to the end.
    open: Sender<()>,
    all_closed: Receiver<()>,
}

impl Printer {
    pub(super) fn new(ranks: u32) -> Self {
        let (open, all_closed) = mpsc::channel();
        Self {
            width: (ranks - 1).to_string().len(),
            errors: Errors::default(),
            progress: Arc::default(),
            pipes: Vec::new(),
            open,
            all_closed,
        }
    }

    /// Prints what comes from `pipe` until it ends.
    pub(super) fn follow(&mut self, rank: u32, stream: Stream, pipe: impl Into<PipeReader>) -> io::Result<()> {
        let prefix = prefix(rank, self.width, stream.is_coloured());
        let (progress, open, pipe) = (Arc::clone(&self.progress), self.open.clone(), Arc::new(pipe.into()));
        self.pipes.push(Arc::downgrade(&pipe));
        let mut errors = (stream == Stream::Err).then(|| self.errors.of_process());
        let mut held = HELD;
        let thread = thread::Builder::new().name(format!("output of rank {rank}"));
        thread.spawn(move || {
            // Whatever nobody reads is still taken from the process, which otherwise would wait for ever.
            for_each_line(&*pipe, &prefix, |line| {
                let said = &line[prefix.len()..];
                if progress.ended.load(Ordering::Relaxed) {
                    held = held.saturating_sub(said.len());
                }
                if held == 0 {
                    return ControlFlow::Break(());
                }
                if !errors.as_mut().is_some_and(|errors| errors.repeats(said)) {
                    progress.print(stream, line);
                }
                ControlFlow::Continue(())
            });
            drop((pipe, open));
        })?;
        Ok(())
    }

    /// Why a line could not be printed, if one could not.
    pub(super) fn unread(&self) -> Option<String> {
        self.progress.unread.get().cloned()
    }

    /// Waits for the last lines of processes that have ended, `patience` for the next to be read, or until `interrupted`.
    ///
    /// # Errors
    /// Why not all could be printed.
    pub(super) fn finish(self, patience: Duration, mut interrupted: impl FnMut() -> bool) -> Result<(), String> {
        let Self { open, all_closed, progress, pipes, .. } = self;
        drop(open);
        progress.ended.store(true, Ordering::Relaxed);
        let (began, mut idle) = (Instant::now(), Duration::ZERO);
        let (mut printed, mut read) = (progress.printed(), began);
        // Nothing is ever sent: this ends when all threads have.
        while idle < LAST_LINES && all_closed.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
            let is_printing = progress.is_printing();
            if interrupted() && is_printing {
                return Err(UNREAD.to_owned());
            }
            if progress.printed() != printed {
                (printed, read) = (progress.printed(), Instant::now());
            }
            if !is_printing {
                idle += POLL;
            } else if read.elapsed() >= patience {
                return Err(format!("no line of the output was read for {patience:?}"));
            } else if began.elapsed() >= ESCAPED && is_held(&pipes) {
                return Err(format!(
                    "the last lines were not read within {ESCAPED:?}, and what has left the job goes on holding its output"
                ));
            }
        }
        progress.unread.get().map_or(Ok(()), |why| Err(why.clone()))
    }
}

/// Whether somebody may yet write to one of them: of processes that have ended, what escaped from their groups.
fn is_held(pipes: &[Weak<PipeReader>]) -> bool {
    pipes.iter().filter_map(Weak::upgrade).any(|pipe| signals::has_writer(&pipe))
}

fn prefix(rank: u32, width: usize, coloured: bool) -> Vec<u8> {
    let text = format!("[rank {rank:>width$}]");
    // The six colours between black and white.
    let text = if coloured { format!("\x1b[{}m{text}\x1b[0m ", 31 + rank % 6) } else { format!("{text} ") };
    text.into_bytes()
}

/// Calls `print` with every line until it says that it has enough, the prefix in front and a line end behind, whether the last one had it or not.
fn for_each_line(pipe: impl Read, prefix: &[u8], mut print: impl FnMut(&[u8]) -> ControlFlow<()>) {
    let mut pipe = BufReader::new(pipe);
    let mut line = prefix.to_vec();
    loop {
        line.truncate(prefix.len());
        match pipe.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line) {
            // A pipe that cannot be read has ended as well.
            Ok(0) | Err(_) => return,
            Ok(_) => {
                if line.last() != Some(&b'\n') {
                    line.push(b'\n');
                }
                if print(&line).is_break() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        let mut lines = Vec::new();
        for_each_line(text.as_bytes(), b"> ", |line| {
            lines.push(String::from_utf8_lossy(line).into_owned());
            ControlFlow::Continue(())
        });
        lines
    }

    #[test]
    fn every_line_gets_a_prefix_and_an_end() {
        assert_eq!(lines("a\n\nb"), ["> a\n", "> \n", "> b\n"]);
        assert!(lines("").is_empty());
    }

    #[test]
    fn an_error_that_all_say_is_said_once() {
        let errors = Errors::default();
        let told = |text: &str| {
            let mut process = errors.of_process();
            text.split_inclusive('\n').filter(|line| !process.repeats(line.as_bytes())).collect::<String>()
        };
        let first = "starts\nerror: slots is 0\n  allowed: 1\n";
        assert_eq!(told(first), first);
        assert_eq!(told(first), "starts\n", "what is no part of an error is always printed");
        assert_eq!(told("error: slots is 0\n  allowed: 2\n  allowed: 1\n"), "  allowed: 2\n  allowed: 1\n");
        assert_eq!(told("error: slots is 1\n  allowed: 1\n"), "error: slots is 1\n  allowed: 1\n");
    }

    #[test]
    fn a_line_without_end_is_printed_in_parts() {
        let long = "x".repeat(LONGEST_LINE as usize + 1);
        assert_eq!(lines(&long).iter().map(String::len).collect::<Vec<_>>(), [LONGEST_LINE as usize + 3, 4]);
    }

    #[test]
    fn prefixes_are_aligned_and_coloured_only_where_told() {
        assert_eq!(prefix(3, 2, false), b"[rank  3] ");
        assert_eq!(prefix(13, 2, true), b"\x1b[32m[rank 13]\x1b[0m ");
    }
}
