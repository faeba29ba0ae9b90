//! Wire formats: views that are checked once, representations that emit, checksums, segmentation.

pub mod virtio_net;
