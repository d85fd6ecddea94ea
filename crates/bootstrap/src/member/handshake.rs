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
    /// The next will not.
    Lasting(Error),
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Self::Passing(error)
    }
}

/// Connects and proves, again and again until `deadline`.
pub(super) fn meet(settings: &Settings, nonce: [u8; 32], deadline: Instant) -> Result<(TcpStream, Session), Error> {
    let start = Instant::now();
    let addresses = socket::resolve(&settings.address, settings.secret.is_some())?;
    let mut pause = PAUSES[0];
    loop {
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for address in &addresses {
            let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
            let attempt = TcpStream::connect_timeout(address, left).map_err(Trouble::from);
            match attempt.and_then(|stream| prove(stream, settings, nonce, deadline)) {
                Ok(met) => return Ok(met),
                Err(Trouble::Lasting(error)) => return Err(error),
                Err(Trouble::Passing(error)) => last = error,
            }
        }
        if Instant::now() + pause >= deadline {
            let address = settings.address.clone();
            return Err(Error::Unreachable { address, waited: start.elapsed(), why: last.to_string() });
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSES[1]);
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
    stream.write_all(&plain(&Opening::Hello { magic: MAGIC, version: VERSION, nonce }))?;
    let Answer::Challenge { version, nonce: theirs } = read(&mut stream, settings, deadline)? else {
        return Err(out_of_place(settings, "something else than a challenge"));
    };
    if version != VERSION {
        return Err(Trouble::Lasting(Error::Version { address, theirs: version, mine: VERSION, rank }));
    }
    let session = Session::new(settings.secret.as_ref(), nonce, theirs);
    stream.write_all(&plain(&Opening::Proof { proof: session.proof(Side::Member, VERSION) }))?;
    match read(&mut stream, settings, deadline)? {
        Answer::Proof { proof } if session.proves(Side::Meeting, VERSION, &proof) => {}
        Answer::Proof { .. } => return Err(Trouble::Lasting(Error::Impostor { address, rank })),
        Answer::WrongSecret => return Err(Trouble::Lasting(Error::WrongSecret { address, rank })),
        Answer::Challenge { .. } => return Err(out_of_place(settings, "a second challenge")),
    }
    stream.set_read_timeout(None)?;
    Ok((stream, session))
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
