//! The init and agent of a lab guest: the only user-space program in its initramfs.
//!
//! Boots in order: mounts, modules, NICs, data service, control loop. It has no children and
//! never returns; when it cannot go on it says why on the console and powers the guest off.

mod agent;
mod boot;
mod bpf;
mod http;
mod ioctl;
mod load;
mod lossy;
mod nic;
mod service;

fn main() {
    if std::process::id() != 1 {
        eprintln!("nightporter-lab-guest is the init of a lab guest; it does nothing elsewhere");
        std::process::exit(1);
    }
    let error = match agent::run() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("nightporter-lab-guest: {error:#}");
    boot::power_off();
}
