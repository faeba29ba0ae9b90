//! The init and agent of a lab guest.
//!
//! It boots in order: mounts, modules, NICs, data service, control loop. Its children are those
//! that the host asks for. It never returns; when it cannot go on, it prints the reason on the
//! console and powers the guest off.

mod agent;
mod boot;
mod bpf;
mod http;
mod ioctl;
mod load;
mod lossy;
mod nic;
mod program;
mod service;
mod vectors;

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
