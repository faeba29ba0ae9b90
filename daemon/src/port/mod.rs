//! Ports: what a frame comes in by and leaves by.

pub mod vhost_user;
