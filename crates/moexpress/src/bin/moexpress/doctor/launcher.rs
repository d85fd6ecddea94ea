//! Who started this process, and which nodes that makes: `torchrun --no-python moexpress doctor` says what a job of it would see.

use ep_bootstrap::{Environment, EnvironmentError, SECRET_VARIABLE, Secret};

use super::Finding;

pub(super) fn look() -> Vec<Finding> {
    findings(Environment::detect(), Secret::detect().map(|secret| secret.is_some()).map_err(|error| error.to_string()))
}

/// `secret`: whether there is one, or what is wrong with it.
fn findings(environment: Result<Environment, EnvironmentError>, secret: Result<bool, String>) -> Vec<Finding> {
    let environment = match environment {
        Ok(environment) => environment,
        Err(EnvironmentError::NotLaunched) => return vec![Finding::good("launcher", "none: this process is no rank")],
        Err(error) => {
            return vec![Finding::missing("launcher", error.to_string(), "--processes, and from Python several nodes")];
        }
    };
    let Environment { launcher, rank, world, local_rank, local_world, .. } = environment;
    let (nodes, node) = (world / local_world.max(1), rank.0 / local_world.max(1));
    let place =
        format!("{launcher}: rank {rank} of {world}, the {local_rank} of {local_world} on node {node} of {nodes}");
    let meets = format!("ranks meet at {}", environment.address());
    vec![
        Finding::good("launcher", format!("{place}; {meets}")),
        match secret {
            Ok(true) => Finding::good("secret", format!("{SECRET_VARIABLE} is set")),
            Ok(false) if nodes > 1 => Finding::missing(
                "secret",
                format!("{SECRET_VARIABLE} is not set"),
                "--processes on several machines: set the same on all; from Python ranks tell each other one",
            ),
            Ok(false) => Finding::good("secret", "none, and none is needed on one node"),
            Err(error) => Finding::missing("secret", error, "--processes"),
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::super::Standing;
    use super::*;

    fn told(variables: &[(&str, &str)], secret: Result<bool, String>) -> Vec<Finding> {
        let value =
            |name: &str| variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        findings(Environment::detect_from(value), secret)
    }

    const PLACE: [(&str, &str); 6] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "machine0"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn a_rank_is_told_its_node_and_what_a_meeting_between_machines_takes() {
        let alone = told(&[], Ok(false));
        assert_eq!(alone, [Finding::good("launcher", "none: this process is no rank")]);
        let [launcher, secret] = &told(&PLACE, Ok(false))[..] else { panic!() };
        assert!(launcher.seen.starts_with("torchrun: rank 3 of 4, the 1 of 2 on node 1 of 2; ranks meet at machine0:"));
        assert_eq!(secret.standing, Standing::Missing);
        assert_eq!(told(&PLACE, Ok(true))[1].standing, Standing::Good);
        assert_eq!(told(&PLACE, Err("it is short".to_owned()))[1].seen, "it is short");
    }

    #[test]
    fn variables_that_contradict_each_other_are_told() {
        let mut place = PLACE;
        place[3].1 = "3";
        let [launcher] = &told(&place, Ok(true))[..] else { panic!() };
        assert_eq!(launcher.standing, Standing::Missing);
        assert!(launcher.seen.contains("LOCAL_WORLD_SIZE is 3"), "{launcher:?}");
    }
}
