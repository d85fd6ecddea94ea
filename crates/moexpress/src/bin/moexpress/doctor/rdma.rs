//! RDMA devices, as the kernel shows them in `/sys/class/infiniband`.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};

use super::{Finding, System, names, text};

const CLASS: &str = "/sys/class/infiniband";
const NEEDS: &str = "lanes between nodes by RDMA; a machine without a card can have Soft-RoCE: modprobe rdma_rxe, \
                     then rdma link add rxe0 type rxe netdev NAME";

pub(super) fn look(system: &System) -> Vec<Finding> {
    let mut findings = vec![library(system)];
    let devices = system.names(CLASS);
    if devices.is_empty() {
        findings.push(Finding::missing("devices", format!("none in {CLASS}"), NEEDS));
    }
    for device in &devices {
        findings.push(device_of(system, device));
        let folder = system.path(CLASS).join(device);
        for port in names(&folder.join("ports")) {
            findings.push(port_of(system, device, &port, &folder.join("ports").join(&port)));
        }
    }
    if !devices.is_empty() {
        findings.push(verbs(system));
        findings.push(device_memory(system, gives_descriptors(), orders_writes()));
    }
    findings
}

fn library(system: &System) -> Finding {
    match system.library("libibverbs.so.1") {
        Some(at) => Finding::good("libibverbs", at.display().to_string()),
        None => Finding::missing(
            "libibverbs",
            "libibverbs.so.1 not found",
            "RDMA (apt install libibverbs1 ibverbs-providers)",
        ),
    }
}

fn device_of(system: &System, device: &str) -> Finding {
    let folder = system.path(CLASS).join(device);
    let driver = std::fs::read_link(folder.join("device/driver"));
    // Soft-RoCE's have no hardware beneath them.
    let driver = driver.ok().and_then(|link| Some(link.file_name()?.to_string_lossy().into_owned()));
    let firmware = text(&folder.join("fw_ver")).filter(|version| !version.is_empty());
    let seen = [
        Some(driver.map_or_else(|| "no hardware beneath it".to_owned(), |driver| format!("driver {driver}"))),
        firmware.map(|version| format!("firmware {version}")),
        text(&folder.join("node_guid")).map(|guid| format!("GUID {guid}")),
    ];
    Finding::good(device, seen.into_iter().flatten().collect::<Vec<_>>().join(", "))
}

/// A GID of a port: its index, address, RoCE version and network device.
struct Gid {
    index: u32,
    address: String,
    kind: Option<String>,
    netdev: Option<String>,
}

/// The GIDs that are set, by index.
fn gids(port: &Path) -> Vec<Gid> {
    const UNSET: &str = "0000:0000:0000:0000:0000:0000:0000:0000";
    let mut gids: Vec<Gid> = names(&port.join("gids"))
        .iter()
        .filter_map(|index| {
            let address = text(&port.join("gids").join(index)).filter(|address| address != UNSET)?;
            let attribute = |folder: &str| text(&port.join("gid_attrs").join(folder).join(index));
            Some(Gid { index: index.parse().ok()?, address, kind: attribute("types"), netdev: attribute("ndevs") })
        })
        .collect();
    gids.sort_by_key(|gid| gid.index);
    gids
}

fn port_of(system: &System, device: &str, port: &str, folder: &Path) -> Finding {
    let what = format!("{device} port {port}");
    let attribute = |name: &str| text(&folder.join(name)).unwrap_or_else(|| "unknown".to_owned());
    // "4: ACTIVE"
    let state = attribute("state");
    let state = state.rsplit(": ").next().unwrap_or_default();
    let gids = gids(folder);
    let mut seen = format!("{state}, {}, {}", attribute("link_layer"), attribute("rate"));
    let netdev = gids.iter().find_map(|gid| gid.netdev.clone());
    let mtu = netdev.as_ref().and_then(|name| system.text(&format!("/sys/class/net/{name}/mtu"))?.parse().ok());
    if let (Some(netdev), Some(mtu)) = (&netdev, mtu) {
        seen += &format!(", {netdev} with MTU {mtu}: {} for RDMA", path_mtu(mtu));
    }
    for Gid { index, address, kind, .. } in &gids {
        seen +=
            &format!(", GID {index} {address}{}", kind.as_ref().map_or_else(String::new, |kind| format!(" ({kind})")));
    }
    if state != "ACTIVE" {
        return Finding::missing(
            what,
            seen,
            "connections on this port: is the cable in, the network device up, the subnet managed?",
        );
    }
    let ethernet = attribute("link_layer") == "Ethernet";
    if ethernet && !gids.iter().any(|gid| gid.kind.as_deref() == Some("RoCE v2")) {
        return Finding::missing(what, seen, "RoCE v2: give the network device an address");
    }
    match mtu {
        Some(mtu) if path_mtu(mtu) < 4096 => {
            Finding::limited(what, seen, "full speed: packets of 4096 bytes need an MTU of 4200 or more on all links")
        }
        _ => Finding::good(what, seen),
    }
}

/// The largest RDMA packet, in bytes, for Ethernet frames with `mtu` bytes: the kernel counts 96 of them for headers.
fn path_mtu(mtu: u32) -> u32 {
    [4096, 2048, 1024, 512].into_iter().find(|size| size + 96 <= mtu).unwrap_or(256)
}

fn verbs(system: &System) -> Finding {
    let all: Vec<PathBuf> = system
        .names("/dev/infiniband")
        .iter()
        .filter(|name| name.starts_with("uverbs"))
        .map(|name| system.path("/dev/infiniband").join(name))
        .collect();
    let opens = |path: &&PathBuf| OpenOptions::new().read(true).write(true).open(path).is_ok();
    match (all.len(), all.iter().filter(opens).count()) {
        (0, _) => Finding::missing(
            "access",
            "no /dev/infiniband/uverbs*",
            "RDMA: modprobe ib_uverbs, or give the container the devices",
        ),
        (all, open) if open < all => Finding::missing(
            "access",
            format!("{open} of {all} files in /dev/infiniband open"),
            "RDMA for this user: see their permissions",
        ),
        (all, _) => Finding::good("access", format!("{all} files in /dev/infiniband")),
    }
}

/// Whether GPUs' driver gives descriptors of their memory.
fn gives_descriptors() -> bool {
    #[cfg(feature = "cuda")]
    {
        let gpus = 0..ep_cuda::driver::devices().unwrap_or(0);
        gpus.filter_map(|ordinal| ep_cuda::driver::Device::open(ordinal).ok()).any(|gpu| gpu.gives_descriptors())
    }
    #[cfg(not(feature = "cuda"))]
    false
}

/// Whether all GPUs order what adapters write to their memory.
fn orders_writes() -> bool {
    #[cfg(feature = "cuda")]
    {
        let gpus = 0..ep_cuda::driver::devices().unwrap_or(0);
        let mut gpus = gpus.filter_map(|ordinal| ep_cuda::driver::Device::open(ordinal).ok());
        gpus.all(|gpu| gpu.orders_writes().unwrap_or(false))
    }
    #[cfg(not(feature = "cuda"))]
    true
}

/// How adapters reach memory of GPUs: by descriptors (dmabuf), or by a module. Where a GPU does not order what they write, that is of no use.
fn device_memory(system: &System, descriptors: bool, ordered: bool) -> Finding {
    const WHAT: &str = "GPU memory for RDMA";
    let loaded =
        ["nvidia_peermem", "nv_peer_mem"].into_iter().find(|module| system.path("/sys/module").join(module).exists());
    if !ordered {
        return Finding::limited(
            WHAT,
            "a GPU does not order what adapters write to it: rows of GPUs are staged through memory of the host",
            "full speed of --backend cuda --far roce, and --far ibgda: a GPU with GPU_DIRECT_RDMA_WRITES_ORDERING",
        );
    }
    match (descriptors, loaded) {
        (true, Some(module)) => Finding::good(WHAT, format!("dmabuf, module {module}")),
        (true, None) => Finding::good(WHAT, "dmabuf, where the adapter's driver takes it"),
        (false, Some(module)) => Finding::good(WHAT, format!("module {module}")),
        (false, None) => Finding::limited(
            WHAT,
            "no dmabuf, no module nvidia_peermem: rows of GPUs are staged through memory of the host",
            "full speed of --backend cuda --far roce, and --far ibgda: modprobe nvidia_peermem, after the adapter's driver",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::Standing;
    use super::*;

    /// A system with one Soft-RoCE device, whose port and GID are as given.
    fn system(state: &str, kind: &str, mtu: &str) -> (tempfile::TempDir, System) {
        let folder = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        };
        let port = "sys/class/infiniband/rxe0/ports/1";
        put("sys/class/infiniband/rxe0/node_guid", "5054:00ff:fe12:3456");
        put(&format!("{port}/state"), state);
        put(&format!("{port}/link_layer"), "Ethernet");
        put(&format!("{port}/rate"), "2.5 Gb/sec (1X SDR)");
        for (index, gid) in
            ["fe80:0000:0000:0000:5054:00ff:fe12:3456", "0000:0000:0000:0000:0000:0000:0000:0000"].iter().enumerate()
        {
            put(&format!("{port}/gids/{index}"), gid);
        }
        put(&format!("{port}/gid_attrs/types/0"), kind);
        put(&format!("{port}/gid_attrs/ndevs/0"), "eth0");
        put("sys/class/net/eth0/mtu", mtu);
        let system = System { root: folder.path().to_owned() };
        (folder, system)
    }

    fn port(system: &System) -> Finding {
        look(system).into_iter().find(|finding| finding.what == "rxe0 port 1").unwrap()
    }

    #[test]
    fn no_device_prevents_far_lanes() {
        let folder = tempfile::tempdir().unwrap();
        let findings = look(&System { root: folder.path().to_owned() });
        let devices = findings.iter().find(|finding| finding.what == "devices").unwrap();
        assert_eq!(devices.standing, Standing::Missing);
    }

    #[test]
    fn a_port_is_good_with_an_address_and_large_frames() {
        let (_folder, system) = system("4: ACTIVE", "RoCE v2", "9000");
        let port = port(&system);
        assert_eq!(port.standing, Standing::Good, "{port:?}");
        assert_eq!(
            port.seen,
            "ACTIVE, Ethernet, 2.5 Gb/sec (1X SDR), eth0 with MTU 9000: 4096 for RDMA, \
             GID 0 fe80:0000:0000:0000:5054:00ff:fe12:3456 (RoCE v2)"
        );
    }

    #[test]
    fn what_is_wrong_with_a_port_is_told() {
        let (_folder, down) = system("1: DOWN", "RoCE v2", "9000");
        assert_eq!(port(&down).standing, Standing::Missing);
        let (_folder, old) = system("4: ACTIVE", "IB/RoCE v1", "9000");
        assert!(port(&old).prevents.unwrap().starts_with("RoCE v2"));
        let (_folder, short) = system("4: ACTIVE", "RoCE v2", "1500");
        let short = port(&short);
        assert_eq!(short.standing, Standing::Limited);
        assert!(short.seen.contains("1024 for RDMA"), "{}", short.seen);
    }

    #[test]
    fn what_rdma_into_memory_of_gpus_needs_is_told() {
        let (folder, system) = system("4: ACTIVE", "RoCE v2", "9000");
        let memory = || look(&system).into_iter().find(|finding| finding.what == "GPU memory for RDMA").unwrap();
        let without = memory();
        assert_eq!(without.standing, Standing::Limited);
        assert!(without.seen.contains("staged through memory of the host"));
        assert!(without.prevents.unwrap().contains("modprobe nvidia_peermem"));
        fs::create_dir_all(folder.path().join("sys/module/nvidia_peermem")).unwrap();
        assert_eq!(memory().standing, Standing::Good);
        let seen = |descriptors| device_memory(&system, descriptors, true).seen;
        assert_eq!([seen(false), seen(true)], ["module nvidia_peermem", "dmabuf, module nvidia_peermem"]);
        let unordered = device_memory(&system, true, false);
        assert_eq!(unordered.standing, Standing::Limited);
        assert!(unordered.seen.contains("does not order what adapters write"));
    }

    #[test]
    fn packets_fit_into_frames() {
        assert_eq!([9000, 4192, 4191, 1500, 600, 100].map(path_mtu), [4096, 4096, 2048, 1024, 256, 256]);
    }
}
