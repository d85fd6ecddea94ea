//! What the hub and the ranks' processes tell each other, over pipes.

use std::io::{self, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// A message is never longer: what claims to be is none.
const MOST: usize = 1 << 30;

/// What a run gave, or what went wrong with it.
pub(super) type Outcome = Result<Returns, String>;

/// By rank; none for ranks that an incident ended.
pub(super) type Returns = Vec<Option<Vec<u8>>>;

/// To a rank's process.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum ToRank {
    /// Go through a case, in which runs have been already.
    Case { name: String, past: Vec<(u64, Outcome)> },
    /// Where the ranks of a run meet.
    Meet { run: u64, port: u16 },
    /// To the judge of a run: what its ranks gave.
    Judge { run: u64, returned: Returns },
    /// What a run gave; of a run that has a judge, what the judge said.
    Ended { run: u64, outcome: Outcome },
}

/// From a rank's process.
#[derive(Serialize, Deserialize, Debug)]
pub(super) enum FromRank {
    /// By rank 0: a run begins, in which some processes may crash and some exit; and who looks at what it gives, if one does for all.
    Begun { run: u64, ranks: u32, port: u16, may_crash: Vec<u32>, exits: Vec<u32>, judge: Option<u32> },
    /// By the judge of a run.
    Judged { run: u64, verdict: Result<Vec<u8>, String> },
    /// This rank's part of a run.
    Returned { run: u64, result: Result<Vec<u8>, String> },
    /// How the case ended here.
    Verdict { result: Result<(), String> },
}

/// A value as bytes.
pub(crate) fn pack(value: &impl Serialize) -> Result<Vec<u8>, String> {
    postcard::to_stdvec(value).map_err(|error| format!("a value that cannot be sent: {error}"))
}

/// The value in `bytes`.
pub(crate) fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    postcard::from_bytes(bytes).map_err(|error| format!("{} bytes that say nothing: {error}", bytes.len()))
}

/// Writes a message: its length, then itself.
pub(super) fn send(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let bytes = pack(message).map_err(io::Error::other)?;
    to.write_all(&(bytes.len() as u64).to_le_bytes())?;
    to.write_all(&bytes)?;
    to.flush()
}

/// Reads a message; none at the end.
pub(super) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 8];
    match from.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    }
    let length = u64::from_le_bytes(length);
    if length > MOST as u64 {
        return Err(io::Error::other(format!("a message of {length} bytes, allowed: {MOST}")));
    }
    let mut bytes = vec![0; length as usize];
    from.read_exact(&mut bytes)?;
    unpack(&bytes).map(Some).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_as_they_were_sent_and_nonsense_is_refused() {
        let outcome: Outcome = Ok(vec![None, Some(vec![7; 300])]);
        let mut bytes = Vec::new();
        send(&mut bytes, &ToRank::Ended { run: 9, outcome: outcome.clone() }).unwrap();
        let came: Option<ToRank> = receive(&mut bytes.as_slice()).unwrap();
        assert!(matches!(came, Some(ToRank::Ended { run: 9, outcome: same }) if same == outcome));
        assert!(receive::<ToRank>(&mut [].as_slice()).unwrap().is_none());
        assert!(receive::<ToRank>(&mut bytes[..20].as_ref()).is_err());
        assert!(receive::<ToRank>(&mut b"running 1 test\n".as_slice()).is_err());
    }
}
