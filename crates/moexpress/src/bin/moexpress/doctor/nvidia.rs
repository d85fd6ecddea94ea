//! NVIDIA's driver, compiler and GPUs.

use ep_cuda::driver::{self, Device};

use super::{Finding, System};

pub(super) fn look(system: &System) -> Vec<Finding> {
    let mut findings = vec![module(system)];
    match driver::devices() {
        Err(error) => findings.push(Finding::missing("driver", error.to_string(), "--backend cuda")),
        Ok(0) => {
            findings.push(Finding::missing(
                "GPUs",
                "none is visible",
                "--backend cuda (CUDA_VISIBLE_DEVICES limits what is)",
            ));
        }
        Ok(gpus) => findings.extend(devices(gpus)),
    }
    findings.push(match ep_cuda::nvrtc_version() {
        Ok((major, minor)) => Finding::good("compiler", format!("NVRTC {major}.{minor}")),
        Err(error) => {
            let what = "--backend cuda, unless EP_CUDA_KERNELS names a folder of compiled kernels";
            Finding::missing("compiler", error.to_string(), what)
        }
    });
    findings
}

fn module(system: &System) -> Finding {
    match system.text("/proc/driver/nvidia/version") {
        Some(version) => Finding::good("kernel module", version.lines().next().unwrap_or_default().to_owned()),
        None => Finding::missing("kernel module", "no /proc/driver/nvidia/version", "--backend cuda"),
    }
}

fn devices(gpus: usize) -> Vec<Finding> {
    let opened: Vec<_> = (0..gpus).map(Device::open).collect();
    let mut findings = Vec::new();
    for (ordinal, device) in opened.iter().enumerate() {
        let what = format!("GPU {ordinal}");
        let device = match device {
            Ok(device) => device,
            Err(error) => {
                findings.push(Finding::missing(what, error.to_string(), "ranks on this GPU"));
                continue;
            }
        };
        let seen = format!("{}, {} multiprocessors", device.arch(), device.multiprocessors());
        let closed: Vec<String> = opened
            .iter()
            .enumerate()
            .filter(|(other, peer)| *other != ordinal && peer.as_ref().is_ok_and(|peer| device.reach(peer).is_err()))
            .map(|(other, _)| other.to_string())
            .collect();
        findings.push(if closed.is_empty() {
            Finding::good(what, format!("{seen}, reaches all others"))
        } else {
            let prevents = "ranks on both in one node: their memory must be reachable, by NVLink or PCIe";
            Finding::limited(what, format!("{seen}, cannot reach GPU {}", closed.join(", ")), prevents)
        });
    }
    findings
}
