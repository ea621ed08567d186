//! The partitioned PMU.
