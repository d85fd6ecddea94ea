//! torchrun: everything is said outright.

use super::{Environment, EnvironmentError, Launcher, Place, Variables, job_port};

pub(super) fn detect(variables: &Variables<'_>) -> Result<Environment, EnvironmentError> {
    const LAUNCHER: Launcher = Launcher::Torchrun;
    let needed = |name| variables.needed(name, LAUNCHER);
    let place = Place {
        rank: needed("RANK")?,
        world: needed("WORLD_SIZE")?,
        local_rank: needed("LOCAL_RANK")?,
        local_world: needed("LOCAL_WORLD_SIZE")?,
    };
    place.check()?;
    let address = variables.needed_text("MASTER_ADDR", LAUNCHER, "a host name or address")?;
    let missing =
        || EnvironmentError::Missing { name: "MASTER_PORT".to_owned(), launcher: LAUNCHER, expected: "a port" };
    let port = variables.port()?.ok_or_else(missing)?;
    // Where torchrun keeps a store of its own at the port, as it does unless told otherwise, ranks meet at another, which all of them
    // know.
    let taken = variables.text("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|used| used.eq_ignore_ascii_case("true"));
    let port = if taken { job_port(u64::from(port) + 5_000) } else { port };
    Ok(place.environment(LAUNCHER, address, port))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{detect, place};

    const GOOD: &str = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=node0 MASTER_PORT=29500";

    #[test]
    fn its_variables_are_understood() {
        let environment = detect(GOOD).unwrap();
        assert_eq!(place(&environment), (5, 8, 1, 4, "node0:29500".to_owned()));
        assert_eq!(environment.topology().unwrap().nodes(), 2);
    }

    #[test]
    fn the_port_of_its_own_store_is_left_to_it() {
        for (given, other) in [(29_500, 24_500), (41_981, 26_981), (24_500, 29_500)] {
            let port = |said: &str| {
                let store = format!("TORCHELASTIC_USE_AGENT_STORE={said}");
                detect(&format!("{} {store}", GOOD.replace("29500", &given.to_string()))).unwrap().master_port
            };
            assert_eq!([port("True"), port("False")], [other, given]);
        }
    }

    #[test]
    fn a_complaint_names_variable_value_and_what_was_expected() {
        for (from, to, text) in [
            ("WORLD_SIZE=8 ", " ", "WORLD_SIZE is not set, expected from torchrun: a whole number"),
            ("RANK=5", "RANK=five", "RANK is 'five', expected: a whole number"),
            ("RANK=5", "RANK=-1", "RANK is '-1', expected: a whole number"),
            ("MASTER_PORT=29500", "MASTER_PORT=0", "MASTER_PORT is 0, expected: a port, 1 to 65535"),
            ("MASTER_PORT=29500", "MASTER_PORT=65536", "MASTER_PORT is '65536', expected: a port, 1 to 65535"),
            ("MASTER_ADDR=node0 ", "", "MASTER_ADDR is not set, expected from torchrun: a host name or address"),
            ("WORLD_SIZE=8 LOCAL", "WORLD_SIZE=0 LOCAL", "WORLD_SIZE is 0, expected: at least 1"),
        ] {
            assert_eq!(detect(&GOOD.replacen(from, to, 1)).unwrap_err().to_string(), text);
        }
    }

    #[test]
    fn contradictions_are_refused() {
        for (from, to, text) in [
            ("RANK=5", "RANK=8", "RANK is 8 and WORLD_SIZE is 8: the first must be below the second"),
            (
                "LOCAL_RANK=1",
                "LOCAL_RANK=4",
                "LOCAL_RANK is 4 and LOCAL_WORLD_SIZE is 4: the first must be below the second",
            ),
            (
                "LOCAL_WORLD_SIZE=4",
                "LOCAL_WORLD_SIZE=3",
                "WORLD_SIZE is 8 and LOCAL_WORLD_SIZE is 3: all nodes must have the same number of processes",
            ),
            (
                "LOCAL_RANK=1",
                "LOCAL_RANK=2",
                "RANK is 5 and LOCAL_RANK is 2: ranks must be placed in blocks, node after node",
            ),
        ] {
            assert_eq!(detect(&GOOD.replacen(from, to, 1)).unwrap_err().to_string(), text);
        }
    }
}
