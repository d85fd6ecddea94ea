//! The two list notations of Slurm: hosts, and tasks of each node.

/// The first host of a list such as `gpu[003-005,9]-a,login`.
pub(super) fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list.trim();
    while let Some(at) = rest.find(['[', ',', ']']) {
        host.push_str(&rest[..at]);
        match rest.as_bytes()[at] {
            b',' => return named(host),
            b'[' => {
                let (inside, after) = rest[at + 1..].split_once(']')?;
                // A range begins with its first number, written with the zeros that belong to the name.
                let first = inside.split([',', '-']).next()?;
                if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = after;
            }
            _ => return None,
        }
    }
    host.push_str(rest);
    named(host)
}

fn named(host: String) -> Option<String> {
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
    (!host.is_empty() && host.bytes().all(is_name)).then_some(host)
}

/// The sizes in `4(x2),3`: (tasks of a node, number of such nodes).
pub(super) fn tasks_per_node(list: &str) -> Option<Vec<(u32, u32)>> {
    let entry = |entry: &str| match entry.trim().split_once("(x") {
        None => Some((entry.trim().parse().ok()?, 1)),
        Some((tasks, nodes)) => Some((tasks.parse().ok()?, nodes.strip_suffix(')')?.parse().ok()?)),
    };
    list.split(',').map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_any_list_is_found() {
        for (list, host) in [
            ("node7", "node7"),
            ("a,b", "a"),
            ("gpu[003-005,9]", "gpu003"),
            ("gpu[12,14]-ib,login", "gpu12-ib"),
            ("rack[1-2]node[08-09],x", "rack1node08"),
            ("10.0.0.4,10.0.0.5", "10.0.0.4"),
        ] {
            assert_eq!(first_host(list).as_deref(), Some(host), "{list}");
        }
        for list in ["", ",a", "gpu[1-2", "gpu[]", "gpu]", "gpu[a-b]", "a b", "[[1]"] {
            assert_eq!(first_host(list), None, "{list}");
        }
    }

    #[test]
    fn task_lists_are_understood() {
        assert_eq!(tasks_per_node("4(x2)"), Some(vec![(4, 2)]));
        assert_eq!(tasks_per_node("4(x2),3,2(x1)"), Some(vec![(4, 2), (3, 1), (2, 1)]));
        for list in ["", "4(x2", "x", "4(x)", "4,,4", "-1", "4(2)"] {
            assert_eq!(tasks_per_node(list), None, "{list}");
        }
    }
}
