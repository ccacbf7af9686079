// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @dev A snapshot lists who was in the registry when members looked, and executions are requested with it later. So
/// an execution may name a node that began to leave so many seconds before the request. While a committee rests, its
/// snapshots are half an hour apart, and members plan by none older than eight before the latest.
uint64 constant SNAPSHOT_AGE_S = 6 hours;
