//! Finding the meeting place, and the mutual proof of the secret.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use super::Settings;
use crate::error::Error;
use crate::secret::{Session, Side};
use crate::socket;
use crate::wire::{Answer, Frames, MAGIC, MAX_OPENING, Malformed, Opening, VERSION, decode, plain};

/// Pauses between attempts to connect: rank 0 may not be there yet.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(200)];

/// Why an attempt failed.
enum Trouble {
    /// The next may succeed.
    Passing(io::Error),
    /// So it may, once there are descriptors again: here, or where the meeting place is. (Who holds the place and gives up
    /// at once takes it from all others.)
    Full(Error),
    /// The next will not.
    Lasting(Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        if socket::is_out_of_descriptors(&error) {
            return Self::Full(Error::Descriptors { place: None, why: error.to_string() });
        }
        Self::Passing(error)
    }
}

/// Connects and proves, again and again until `deadline`.
pub(super) fn meet(settings: &Settings, nonce: [u8; 32], deadline: Instant) -> Result<(TcpStream, Session), Error> {
    let start = Instant::now();
    let addresses = socket::resolve(&settings.address, settings.secret.is_some())?;
    let mut pause = PAUSES[0];
    let mut last = Trouble::Passing(io::ErrorKind::NotFound.into());
    loop {
        for address in &addresses {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let attempt = TcpStream::connect_timeout(address, left).map_err(Trouble::from);
            match attempt.and_then(|stream| prove(stream, settings, nonce, deadline)) {
                Ok(met) => return Ok(met),
                Err(Trouble::Lasting(error)) => return Err(error),
                // That says more than how a later attempt ended: then the place may have closed for the same reason.
                Err(Trouble::Passing(_)) if matches!(last, Trouble::Full(_)) => {}
                Err(passing) => last = passing,
            }
        }
        if Instant::now() + pause >= deadline {
            return Err(gave_up(settings, start, last));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSES[1]);
    }
}

/// What is said at the deadline.
fn gave_up(settings: &Settings, start: Instant, last: Trouble) -> Error {
    let address = settings.address.clone();
    match last {
        Trouble::Passing(error) => Error::Unreachable { address, waited: start.elapsed(), why: error.to_string() },
        Trouble::Full(error) | Trouble::Lasting(error) => error,
    }
}

fn prove(
    mut stream: TcpStream,
    settings: &Settings,
    nonce: [u8; 32],
    deadline: Instant,
) -> Result<(TcpStream, Session), Trouble> {
    let (address, rank) = (settings.address.clone(), settings.rank.0);
    socket::prepare(&stream)?;
    stream.set_write_timeout(Some(left(deadline)?))?;
    say(&mut stream, settings, deadline, &Opening::Hello { magic: MAGIC, version: VERSION, nonce })?;
    let (version, theirs) = match read(&mut stream, settings, deadline)? {
        Answer::Challenge { version, nonce } => (version, nonce),
        Answer::Full { why } => return Err(full(settings, why)),
        Answer::Proof { .. } | Answer::WrongSecret => {
            return Err(out_of_place(settings, "something else than a challenge"));
        }
    };
    if version != VERSION {
        return Err(Trouble::Lasting(Error::Version { address, theirs: version, mine: VERSION, rank }));
    }
    let session = Session::new(settings.secret.as_ref(), nonce, theirs);
    say(&mut stream, settings, deadline, &Opening::Proof { proof: session.proof(Side::Member, VERSION) })?;
    match read(&mut stream, settings, deadline)? {
        Answer::Proof { proof } if session.proves(Side::Meeting, VERSION, &proof) => {}
        Answer::Proof { .. } => return Err(Trouble::Lasting(Error::Impostor { address, rank })),
        Answer::WrongSecret => return Err(Trouble::Lasting(Error::WrongSecret { address, rank })),
        Answer::Full { why } => return Err(full(settings, why)),
        Answer::Challenge { .. } => return Err(out_of_place(settings, "a second challenge")),
    }
    stream.set_read_timeout(None)?;
    Ok((stream, session))
}

/// Sends `opening`. A place that has no descriptor left says so and closes, whatever is under way to it: then its answer is there although
/// nothing can be sent any more.
fn say(stream: &mut TcpStream, settings: &Settings, deadline: Instant, opening: &Opening) -> Result<(), Trouble> {
    let Err(error) = stream.write_all(&plain(opening)) else { return Ok(()) };
    match read(stream, settings, deadline) {
        Ok(Answer::Full { why }) => Err(full(settings, why)),
        _ => Err(error.into()),
    }
}

fn full(settings: &Settings, why: String) -> Trouble {
    Trouble::Full(Error::Descriptors { place: Some(settings.address.clone()), why })
}

fn out_of_place(settings: &Settings, what: &'static str) -> Trouble {
    malformed(settings, Malformed::OutOfPlace { what })
}

fn malformed(settings: &Settings, why: Malformed) -> Trouble {
    Trouble::Lasting(Error::Malformed { address: settings.address.clone(), why })
}

fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Reads one answer and not a byte more: the meeting place says nothing that it was not asked for.
fn read(stream: &mut TcpStream, settings: &Settings, deadline: Instant) -> Result<Answer, Trouble> {
    let mut frames = Frames::default();
    let mut byte = [0; 1];
    loop {
        stream.set_read_timeout(Some(left(deadline)?))?;
        if stream.read(&mut byte)? == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it closed the connection").into());
        }
        frames.push(&byte);
        if let Some(frame) = frames.next(MAX_OPENING).map_err(|why| malformed(settings, why))? {
            return decode(frame).map_err(|why| malformed(settings, why));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use ep_core::Rank;

    use super::*;
    use crate::secret::{Secret, random};

    /// What a rank makes of a place that challenges with `version` and proves with another secret than the job's.
    fn met(version: u16) -> Error {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let secret = |text| Some(Secret::from_text(text).unwrap());
        let settings = Settings::new(Rank(1), 2, &address).secret(secret("the job's"));
        let within = Duration::from_secs(20);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                let opening = |stream: &mut TcpStream| {
                    let mut frames = Frames::default();
                    let mut byte = [0; 1];
                    loop {
                        if stream.read(&mut byte).unwrap() == 0 {
                            return None;
                        }
                        frames.push(&byte);
                        if let Some(frame) = frames.next(MAX_OPENING).unwrap() {
                            return Some(decode::<Opening>(frame).unwrap());
                        }
                    }
                };
                let Some(Opening::Hello { nonce, .. }) = opening(&mut stream) else { panic!("no hello") };
                let own = random().unwrap();
                stream.write_all(&plain(&Answer::Challenge { version, nonce: own })).unwrap();
                // Who refuses the version says no more.
                if opening(&mut stream).is_some() {
                    let session = Session::new(secret("a guess").as_ref(), nonce, own);
                    let proof = session.proof(Side::Meeting, VERSION);
                    stream.write_all(&plain(&Answer::Proof { proof })).unwrap();
                }
            });
            meet(&settings, [5; 32], Instant::now() + within).map(|_| ()).unwrap_err()
        })
    }

    #[test]
    fn a_place_that_does_not_hold_the_secret_is_an_impostor() {
        assert!(matches!(met(VERSION), Error::Impostor { rank: 1, .. }));
    }

    #[test]
    fn a_place_of_another_version_is_named() {
        let error = met(VERSION + 1);
        assert!(
            matches!(error, Error::Version { theirs, mine: VERSION, rank: 1, .. } if theirs == VERSION + 1),
            "{error}"
        );
    }
}
