//! Guest kernels and initramfs images made from Debian packages.
