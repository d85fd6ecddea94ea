//! What the processes of one job know and others do not, and how they prove it.

use std::fmt;

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

use crate::error::Error;

type HmacSha256 = Hmac<Sha256>;

/// The variable that holds the secret of a job.
pub const SECRET_VARIABLE: &str = "MOEXPRESS_SECRET";

/// A key of 256 bits shared by all processes of a job.
///
/// Processes prove to each other that they hold it, without showing it. A short or guessable text makes a weak key: who
/// records a meeting can try texts at leisure. [`Secret::generate`] makes a strong one.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A fresh secret from the operating system.
    ///
    /// # Errors
    /// [`Error::Random`] when the system has no random numbers.
    pub fn generate() -> Result<Self, Error> {
        random().map(Self)
    }

    /// The secret that `text` says: 64 hexadecimal digits are the key itself, any other text is hashed to one. A text that
    /// is nearly 64 such digits is refused: a key that lost a digit on its way, and not a text.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is empty or nearly a key. The error does not show the text.
    pub fn from_text(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        if text.is_empty() {
            return Err(Error::invalid("the job secret", "empty", "64 hexadecimal digits, or any other text"));
        }
        if let Some(digits) = nearly_hex(text) {
            let others = text.chars().count() - digits;
            let value = format_args!("{digits} hexadecimal digits and {others} other characters");
            return Err(Error::invalid(
                "the job secret",
                value,
                "64 such digits and nothing else, or a text unlike that",
            ));
        }
        let key = from_hex(text).unwrap_or_else(|| mac(&[0; 32], &[b"moexpress secret", text.as_bytes()]));
        Ok(Self(key))
    }

    /// The secret in `MOEXPRESS_SECRET`, if that is set.
    ///
    /// # Errors
    /// [`Error::Invalid`] when it is set to nothing, to bytes that are no text, or nearly to a key.
    pub fn detect() -> Result<Option<Self>, Error> {
        let text = |value: std::ffi::OsString| {
            value.into_string().map_err(|_| Error::invalid(SECRET_VARIABLE, "no UTF-8 text", "UTF-8 text"))
        };
        std::env::var_os(SECRET_VARIABLE).map(|value| Self::from_text(&text(value)?)).transpose()
    }

    /// 64 hexadecimal digits, to be handed to the processes of the job.
    pub fn to_hex(&self) -> String {
        use fmt::Write as _;
        self.0.iter().fold(String::with_capacity(64), |mut text, byte| {
            // Writing to a string never fails.
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let digits: Vec<u8> =
        text.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    (digits.len() == 64).then(|| bytes.try_into().ok()).flatten()
}

/// How many hexadecimal digits a text has that looks like a key and is none: within an eighth of 64, and hardly anything else.
fn nearly_hex(text: &str) -> Option<usize> {
    let (all, digits) = (text.chars().count(), text.chars().filter(char::is_ascii_hexdigit).count());
    ((56..=72).contains(&digits) && all - digits <= 8 && (digits, all) != (64, 64)).then_some(digits)
}

/// 32 random bytes.
pub(crate) fn random() -> Result<[u8; 32], Error> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| Error::Random { why: error.to_string() })?;
    Ok(bytes)
}

fn keyed(key: &[u8; 32], parts: &[&[u8]]) -> HmacSha256 {
    // HMAC fills keys up with zeros to a block, so this is the same as the short key.
    let mut block = hmac::digest::Key::<HmacSha256>::default();
    block[..32].copy_from_slice(key);
    let mut hmac = HmacSha256::new(&block);
    for part in parts {
        // Lengths, so that no two lists of parts look the same.
        hmac.update(&(part.len() as u64).to_le_bytes());
        hmac.update(part);
    }
    hmac
}

fn mac(key: &[u8; 32], parts: &[&[u8]]) -> [u8; 32] {
    keyed(key, parts).finalize().into_bytes().into()
}

/// Who proves, or who sends. Part of every proof and tag, so that nothing said by one side serves the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Side {
    /// A process that joins.
    Member,
    /// The meeting place.
    Meeting,
}

impl Side {
    const fn label(self) -> &'static [u8] {
        match self {
            Self::Member => b"moexpress member",
            Self::Meeting => b"moexpress meeting place",
        }
    }
}

/// One meeting of a member and a meeting place, before either trusts the other: the key and both nonces.
#[derive(Clone)]
pub(crate) struct Session {
    key: [u8; 32],
    member: [u8; 32],
    meeting: [u8; 32],
}

impl Session {
    /// Without a secret the key is known to everybody. Such meetings are held on loopback addresses only.
    pub(crate) fn new(secret: Option<&Secret>, member: [u8; 32], meeting: [u8; 32]) -> Self {
        Self { key: secret.map_or([0; 32], |secret| secret.0), member, meeting }
    }

    fn parts<'a>(&'a self, label: &'a [u8], version: &'a [u8; 2]) -> [&'a [u8]; 4] {
        [label, version, &self.member, &self.meeting]
    }

    /// What `side` shows to prove that it holds the key.
    pub(crate) fn proof(&self, side: Side, version: u16) -> [u8; 32] {
        mac(&self.key, &self.parts(side.label(), &version.to_le_bytes()))
    }

    /// Whether `proof` is that of `side`. Takes the same time for every wrong proof.
    pub(crate) fn proves(&self, side: Side, version: u16, proof: &[u8; 32]) -> bool {
        keyed(&self.key, &self.parts(side.label(), &version.to_le_bytes())).verify_slice(proof).is_ok()
    }

    /// The seal of what `side` sends from now on.
    pub(crate) fn seal(&self, side: Side, version: u16) -> Seal {
        let key = mac(&self.key, &self.parts(b"moexpress session", &version.to_le_bytes()));
        Seal { key, side, count: 0 }
    }
}

/// Tags the messages of one direction of one connection, so that nobody in between changes, repeats, drops or reorders
/// them unnoticed. They are not encrypted.
pub(crate) struct Seal {
    key: [u8; 32],
    side: Side,
    count: u64,
}

impl Seal {
    fn next(&mut self, digest: &[u8; 32]) -> HmacSha256 {
        let count = self.count.to_le_bytes();
        self.count += 1;
        keyed(&self.key, &[self.side.label(), &count, digest])
    }

    /// The tag of the next message, which has this digest.
    pub(crate) fn tag(&mut self, digest: &[u8; 32]) -> [u8; 32] {
        self.next(digest).finalize().into_bytes().into()
    }

    /// Whether `tag` is that of the next message, which has this digest.
    pub(crate) fn verifies(&mut self, digest: &[u8; 32], tag: &[u8]) -> bool {
        self.next(digest).verify_slice(tag).is_ok()
    }
}

/// SHA-256.
pub(crate) fn digest(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hexadecimal_digits_are_the_key_and_other_text_is_hashed() {
        let secret = Secret::generate().unwrap();
        assert_eq!(Secret::from_text(&secret.to_hex()), Ok(secret.clone()));
        assert_eq!(Secret::from_text(&secret.to_hex().to_uppercase()), Ok(secret));
        assert_ne!(Secret::from_text("a").unwrap(), Secret::from_text("b").unwrap());
        assert!(Secret::from_text(" ").unwrap_err().to_string().contains("64 hexadecimal digits"));
    }

    #[test]
    fn what_is_nearly_a_key_is_refused_and_not_shown() {
        let key = Secret([0xa7; 32]).to_hex();
        let missed = [
            key[1..].to_owned(),
            format!("{key}0"),
            format!("0x{key}"),
            key.replacen('a', "o", 1),
            format!("{} {}", &key[..32], &key[32..]),
            format!("\"{key}\""),
        ];
        for text in missed {
            let refusal = Secret::from_text(&text).unwrap_err().to_string();
            assert!(refusal.contains("hexadecimal digits and ") && !refusal.contains("a7a7"), "{text}: {refusal}");
        }
        let refusal = Secret::from_text(&format!("\"{key}\"")).unwrap_err().to_string();
        assert!(refusal.contains("64 hexadecimal digits and 2 other characters"), "{refusal}");
        // Words, identifiers and hashes of other lengths are texts.
        let sentence = format!("{} and many more words", &key[..56]);
        for text in ["correct horse", "6f9619ff-8b86-d011-b42d-00cf4fc964ff", &key[..40], &key.repeat(2), &sentence] {
            assert!(Secret::from_text(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn what_is_drawn_at_random_differs() {
        assert_ne!(random().unwrap(), random().unwrap());
        assert_ne!(Secret::generate().unwrap(), Secret::generate().unwrap());
    }

    #[test]
    fn a_secret_does_not_show_in_logs() {
        assert_eq!(format!("{:?}", Secret([7; 32])), "Secret(..)");
    }

    #[test]
    fn hmac_is_the_standard_one() {
        // RFC 4231, test case 2, computed with the key filled up to 32 bytes, which changes nothing.
        let mut key = [0; 32];
        key[..4].copy_from_slice(b"Jefe");
        let mut hmac = keyed(&key, &[]);
        hmac.update(b"what do ya want for nothing?");
        let mac: [u8; 32] = hmac.finalize().into_bytes().into();
        assert_eq!(Secret(mac).to_hex(), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    }

    #[test]
    fn a_digest_is_the_standard_one() {
        assert_eq!(Secret(digest(b"abc")).to_hex(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }

    #[test]
    fn a_proof_serves_one_side_of_one_meeting_only() {
        let session = Session::new(Some(&Secret([1; 32])), [2; 32], [3; 32]);
        let proof = session.proof(Side::Member, 1);
        assert!(session.proves(Side::Member, 1, &proof));
        assert!(!session.proves(Side::Meeting, 1, &proof) && !session.proves(Side::Member, 2, &proof));
        for other in [
            Session::new(Some(&Secret([9; 32])), [2; 32], [3; 32]),
            Session::new(None, [2; 32], [3; 32]),
            Session::new(Some(&Secret([1; 32])), [2; 32], [4; 32]),
        ] {
            assert!(!other.proves(Side::Member, 1, &proof));
        }
    }

    /// However few of its bytes are wrong.
    #[test]
    fn a_proof_or_tag_with_any_wrong_byte_is_refused() {
        let session = Session::new(Some(&Secret([1; 32])), [2; 32], [3; 32]);
        let digest = digest(b"hello");
        let (proof, tag) = (session.proof(Side::Member, 1), session.seal(Side::Member, 1).tag(&digest));
        for at in 0..32 {
            let wrong = |mut bytes: [u8; 32]| {
                bytes[at] ^= 1;
                bytes
            };
            assert!(!session.proves(Side::Member, 1, &wrong(proof)), "byte {at} of a proof");
            assert!(!session.seal(Side::Member, 1).verifies(&digest, &wrong(tag)), "byte {at} of a tag");
        }
    }

    #[test]
    fn a_message_said_again_or_by_the_other_side_is_noticed() {
        let session = Session::new(None, [2; 32], [3; 32]);
        let digest = digest(b"hello");
        let tag = session.seal(Side::Member, 1).tag(&digest);
        let mut seal = session.seal(Side::Member, 1);
        assert!(seal.verifies(&digest, &tag) && !seal.verifies(&digest, &tag));
        assert!(!session.seal(Side::Meeting, 1).verifies(&digest, &tag));
    }
}
