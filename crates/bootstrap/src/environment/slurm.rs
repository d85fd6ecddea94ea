//! Slurm: the sizes of nodes and the first host come as lists, the port from the number of the job.

use super::hostlist::{first_host, tasks_per_node};
use super::{Environment, EnvironmentError, Launcher, Place, Read, Variables, job_port};

const LAUNCHER: Launcher = Launcher::Slurm;

pub(super) fn detect(variables: &Variables<'_>) -> Result<Environment, EnvironmentError> {
    let world = variables.needed("SLURM_NTASKS", LAUNCHER)?;
    let place = Place {
        rank: variables.needed("SLURM_PROCID", LAUNCHER)?,
        local_rank: variables.needed("SLURM_LOCALID", LAUNCHER)?,
        local_world: local_world(variables, &world)?,
        world,
    };
    place.check()?;
    Ok(place.environment(LAUNCHER, address(variables)?, port(variables)?))
}

/// Tasks of each node, which must be the same everywhere and make up `world`.
fn local_world(variables: &Variables<'_>, world: &Read<u32>) -> Result<Read<u32>, EnvironmentError> {
    const WISH: &str = "SLURM_NTASKS_PER_NODE";
    // What the step really got comes before what the job was promised.
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    let Some((name, list)) = lists.into_iter().find_map(|name| Some((name, variables.text(name)?))) else {
        return variables.needed(WISH, LAUNCHER);
    };
    let invalid = |expected: &str| EnvironmentError::invalid(name, format_args!("'{list}'"), expected);
    let sizes = tasks_per_node(&list).ok_or_else(|| invalid("a list such as 4(x2),3"))?;
    let total = sizes.iter().map(|&(tasks, nodes)| u64::from(tasks) * u64::from(nodes)).fold(0, u64::saturating_add);
    if total != u64::from(world.value) {
        return Err(invalid(&format!("{} tasks in all, as SLURM_NTASKS says, not {total}", world.value)));
    }
    let size = sizes[0].0;
    if sizes.iter().any(|&(tasks, _)| tasks != size) {
        return Err(invalid("the same number of tasks on every node"));
    }
    match variables.number::<u32>(WISH, "a whole number")? {
        Some(wish) if wish != size => Err(EnvironmentError::Contradiction {
            names: [WISH.to_owned(), name.to_owned()],
            values: [wish.to_string(), list],
            why: "they must say the same",
        }),
        _ => Ok(Read { name: name.to_owned(), value: size }),
    }
}

fn address(variables: &Variables<'_>) -> Result<String, EnvironmentError> {
    if let Some(address) = variables.text("MASTER_ADDR") {
        return Ok(address);
    }
    // The hosts of the step come before those of the job; SLURM_NODELIST is the old name of the latter.
    let names = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    let Some((name, list)) = names.into_iter().find_map(|name| Some((name, variables.text(name)?))) else {
        let expected = "a list of hosts such as gpu[1-4]";
        return Err(EnvironmentError::Missing { name: names[1].to_owned(), launcher: LAUNCHER, expected });
    };
    first_host(&list)
        .ok_or_else(|| EnvironmentError::invalid(name, format_args!("'{list}'"), "a list of hosts such as gpu[1-4]"))
}

/// A port that jobs and steps at the same time most likely do not share.
fn port(variables: &Variables<'_>) -> Result<u16, EnvironmentError> {
    if let Some(port) = variables.port()? {
        return Ok(port);
    }
    let mut job = None;
    for name in ["SLURM_JOB_ID", "SLURM_JOBID"] {
        job = job.or(variables.number::<u64>(name, "a whole number")?);
    }
    let missing = || EnvironmentError::Missing {
        name: "SLURM_JOB_ID".to_owned(),
        launcher: LAUNCHER,
        expected: "a whole number, for the port; or set MASTER_PORT",
    };
    let job = job.ok_or_else(missing)?;
    // Special steps have numbers near 2^32.
    let step = variables.number::<u64>("SLURM_STEP_ID", "a whole number")?.unwrap_or(0);
    Ok(job_port(job.wrapping_add(step)))
}

#[cfg(test)]
mod tests {
    use super::super::tests::{detect, place};

    const GOOD: &str = "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_TASKS_PER_NODE=4(x2) \
                        SLURM_JOB_NODELIST=gpu[07-08] SLURM_JOB_ID=123456";

    #[test]
    fn lists_and_the_job_number_give_place_and_port() {
        assert_eq!(place(&detect(GOOD).unwrap()), (5, 8, 1, 4, "gpu07:23456".to_owned()));
        let step = format!("{GOOD} SLURM_STEP_ID=2 SLURM_STEP_NODELIST=gpu08,gpu09");
        assert_eq!(detect(&step).unwrap().address(), "gpu08:23458");
    }

    #[test]
    fn the_user_may_say_where_to_meet() {
        let said = format!("{GOOD} MASTER_ADDR=10.1.1.1 MASTER_PORT=999");
        assert_eq!(detect(&said).unwrap().address(), "10.1.1.1:999");
    }

    #[test]
    fn older_names_are_understood() {
        let old = GOOD
            .replace("SLURM_TASKS_PER_NODE=4(x2)", "SLURM_NTASKS_PER_NODE=4")
            .replace("SLURM_JOB_NODELIST", "SLURM_NODELIST")
            .replace("SLURM_JOB_ID", "SLURM_JOBID");
        assert_eq!(place(&detect(&old).unwrap()), (5, 8, 1, 4, "gpu07:23456".to_owned()));
    }

    #[test]
    fn a_complaint_names_variable_value_and_what_was_expected() {
        for (from, to, text) in [
            ("4(x2)", "5,3", "SLURM_TASKS_PER_NODE is '5,3', expected: the same number of tasks on every node"),
            ("4(x2)", "4(x", "SLURM_TASKS_PER_NODE is '4(x', expected: a list such as 4(x2),3"),
            (
                "4(x2)",
                "4(x3)",
                "SLURM_TASKS_PER_NODE is '4(x3)', expected: 8 tasks in all, as SLURM_NTASKS says, not 12",
            ),
            (
                "4(x2)",
                "4(x2) SLURM_NTASKS_PER_NODE=8",
                "SLURM_NTASKS_PER_NODE is 8 and SLURM_TASKS_PER_NODE is 4(x2): they must say the same",
            ),
            ("gpu[07-08]", "gpu[", "SLURM_JOB_NODELIST is 'gpu[', expected: a list of hosts such as gpu[1-4]"),
            (
                "SLURM_JOB_ID=123456",
                "",
                "SLURM_JOB_ID is not set, expected from Slurm: a whole number, for the port; or set MASTER_PORT",
            ),
            (
                "LOCALID=1",
                "LOCALID=0",
                "SLURM_PROCID is 5 and SLURM_LOCALID is 0: ranks must be placed in blocks, node after node",
            ),
        ] {
            assert_eq!(detect(&GOOD.replacen(from, to, 1)).unwrap_err().to_string(), text);
        }
    }
}
