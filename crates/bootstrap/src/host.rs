//! Which processes run on one host.

use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use rustix::system::uname;

/// Where the system says which boot of it this is.
const BOOT: &str = "/proc/sys/kernel/random/boot_id";

/// Names a running system: the same for all of its processes, in whatever container, and no other's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Host([u8; Self::BYTES]);

impl Host {
    /// Of its bytes.
    pub const BYTES: usize = 16;

    /// That of this process. A system that does not name its boot is taken for what its processes call it.
    #[must_use]
    pub fn this() -> Self {
        let boot = fs::read_to_string(BOOT).ok().and_then(|text| Self::of(&text));
        boot.unwrap_or_else(|| Self::called(uname().nodename().to_bytes()))
    }

    fn called(name: &[u8]) -> Self {
        // Told to processes of the same build alone.
        let half = |salt: u8| {
            let mut hasher = DefaultHasher::new();
            (salt, name).hash(&mut hasher);
            hasher.finish().to_be_bytes()
        };
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&half(0));
        bytes[8..].copy_from_slice(&half(1));
        Self(bytes)
    }

    fn of(text: &str) -> Option<Self> {
        let digits: String = text.trim().chars().filter(|&c| c != '-').collect();
        let is_name = digits.len() == 2 * Self::BYTES && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
        is_name.then(|| u128::from_str_radix(&digits, 16).ok()).flatten().map(|name| Self(name.to_be_bytes()))
    }

    /// For other processes.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0
    }

    /// What another process told.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_by_its_boot_and_by_nothing_else() {
        let host = Host::of("01234567-89ab-cdef-0123-456789abcdef\n").unwrap();
        assert_eq!(host.to_bytes()[..2], [1, 0x23]);
        assert_eq!(Host::from_bytes(host.to_bytes()), host);
        for wrong in
            ["", "none", "0123", "01234567-89ab-cdef-0123-456789abcdefff", "+1234567-89ab-cdef-0123-456789abcdef"]
        {
            assert_eq!(Host::of(wrong), None, "{wrong}");
        }
        assert_eq!(Host::this(), Host::this());
        assert!(Host::called(b"a") == Host::called(b"a") && Host::called(b"a") != Host::called(b"b"));
    }
}
