//! How the vector cores of a device are divided.

use ep_core::{Error, c_struct};

c_struct! {
    /// Cores of each role, in the order of their numbers.
    #[derive(Eq)]
    pub struct Roles = "EpRoles" {
        /// Senders of a dispatch, returners of a combine: each serves channels.
        pub senders: u32,
        /// The first one is the control core. The others post to other servers, each to some of the rail peers.
        pub coordinators: u32,
        /// They pass on rows that other servers send; in a combine they gather what goes back there.
        pub forwarders: u32,
        /// Nothing: credit goes by the queue that rows go by, and a queue has one poster.
        pub forwarder_coordinators: u32,
        /// Receivers of a dispatch, reducers of a combine: each serves channels.
        pub receivers: u32,
    }
}

/// Vector cores of the largest device.
pub(crate) const MOST_CORES: u32 = 48;

impl Roles {
    /// The division of a device with so many vector cores, a multiple of 4: four coordinators, and a quarter less one of each other role. 48
    /// are 11 + 4 + 11 + 11 + 11, 40 are 9 + 4 + 9 + 9 + 9.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a number of cores that is no multiple of 4 from 8 to 48.
    pub fn of_cores(cores: u32) -> Result<Self, Error> {
        if !cores.is_multiple_of(4) || !(8..=MOST_CORES).contains(&cores) {
            return Err(Error::invalid("cores", cores, format_args!("a multiple of 4, 8 to {MOST_CORES}")));
        }
        let each = cores / 4 - 1;
        Ok(Self { senders: each, coordinators: 4, forwarders: each, forwarder_coordinators: each, receivers: each })
    }

    /// The division of a SoC by the name that it gives itself; none for one that is no Ascend 910B.
    pub fn of_soc(name: &str) -> Option<Self> {
        let cores = match name {
            "Ascend910B1" | "Ascend910B2" | "Ascend910B2C" => 48,
            "Ascend910B3" | "Ascend910B4" | "Ascend910B4-1" => 40,
            _ => return None,
        };
        Self::of_cores(cores).ok()
    }

    /// A division of one's own.
    ///
    /// # Errors
    /// [`Error::Invalid`] where a launch would have no sender, coordinator or receiver, or more than 48 cores.
    pub fn checked(self) -> Result<Self, Error> {
        let needed = [("senders", self.senders), ("coordinators", self.coordinators), ("receivers", self.receivers)];
        for (what, cores) in needed {
            if cores == 0 {
                return Err(Error::invalid(what, cores, "1 or more cores"));
            }
        }
        let all = [self.senders, self.coordinators, self.forwarders, self.forwarder_coordinators, self.receivers];
        let cores = all.into_iter().try_fold(0, u32::checked_add).unwrap_or(u32::MAX);
        if cores > MOST_CORES {
            return Err(Error::invalid("cores of all roles", cores, format_args!("up to {MOST_CORES}")));
        }
        Ok(self)
    }

    /// A division for so many servers.
    ///
    /// # Errors
    /// [`Error::Invalid`] where nobody would post to the others, or pass on what comes from them.
    pub(crate) fn over(self, nodes: u32) -> Result<Self, Error> {
        if nodes > 1 && self.coordinators < 2 {
            return Err(Error::invalid("coordinators over several nodes", self.coordinators, "2 or more cores"));
        }
        if nodes > 1 && self.forwarders == 0 {
            return Err(Error::invalid("forwarders over several nodes", self.forwarders, "1 or more cores"));
        }
        Ok(self)
    }

    /// Cores of all roles: blocks of a launch.
    pub const fn cores(&self) -> u32 {
        self.senders + self.coordinators + self.forwarders + self.forwarder_coordinators + self.receivers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_socs_are_divided_without_rest() {
        let parts = |cores| {
            let roles = Roles::of_cores(cores).and_then(Roles::checked).expect("a SoC's number of cores");
            assert_eq!(roles.cores(), cores);
            [roles.senders, roles.coordinators, roles.forwarders, roles.forwarder_coordinators, roles.receivers]
        };
        assert_eq!(parts(48), [11, 4, 11, 11, 11]);
        assert_eq!(parts(40), [9, 4, 9, 9, 9]);
    }

    #[test]
    fn a_soc_is_known_by_its_name() {
        let cores = |name| Roles::of_soc(name).map(|roles| roles.cores());
        assert_eq!([cores("Ascend910B1"), cores("Ascend910B4-1"), cores("Ascend310P3")], [Some(48), Some(40), None]);
    }

    #[test]
    fn what_cannot_be_divided_is_refused() {
        for cores in [0, 4, 41, 52, u32::MAX] {
            assert!(Roles::of_cores(cores).is_err(), "{cores}");
        }
        let roles = Roles::of_cores(8).expect("two cores a quarter");
        assert!(Roles { receivers: 0, ..roles }.checked().is_err());
        let many = Roles { senders: u32::MAX, ..roles }.checked().map_err(|error| error.to_string());
        assert!(many.is_err_and(|said| said.contains("up to 48")));
    }
}
