// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

/// @notice One task of a model's graph.
/// @param taskId Digest of the task's canonical encoding.
/// @param vramBytes Video memory that the task needs, in bytes.
/// @param flops Floating-point operations of one step.
/// @param priceNanoUsdc Reward for one step, in nano-USDC.
struct Task {
    bytes32 taskId;
    uint64 vramBytes;
    uint64 flops;
    uint64 priceNanoUsdc;
}

/// @notice A registered model.
/// @param developer Account that registered the model.
/// @param taskCount Number of tasks, 1 to 1024.
/// @param pricePerStep Sum of the tasks' rewards for one step, in nano-USDC.
/// @param dagRoot keccak256(abi.encode(tasks, edges)); the tasks and edges are in the `ModelRegistered` event.
/// @param name Name under which the model was registered.
struct Model {
    address developer;
    uint16 taskCount;
    uint80 pricePerStep;
    bytes32 dagRoot;
    string name;
}

/// @title The models and their task graphs
/// @notice Stores a hash of the graph and a price per model; the graph itself is in an event. A name belongs to the
/// developer who used it first. Registering another model under the name makes the name point to that model.
interface IModelRegistry {
    // ------------------------------------------------------------------------------- errors

    /// @notice The model's id or the id of a task is zero.
    error IdMissing();
    /// @notice A model with this id is already registered.
    error ModelExists(bytes32 modelId);
    /// @notice No model with this id is registered.
    error UnknownModel(bytes32 modelId);
    /// @notice The caller is not the model's developer, `developer`.
    error NotDeveloper(bytes32 modelId, address developer);
    /// @notice The model is already retired.
    error ModelRetiredAlready(bytes32 modelId);
    /// @notice No model is registered under this name.
    error UnknownName(string name);
    /// @notice The name belongs to another developer, `owner`.
    error NameTaken(string name, address owner);
    /// @notice A name has 1 to 64 bytes; this one has `length`.
    error NameLengthInvalid(uint256 length);
    /// @notice A model has 1 to 1024 tasks; this one has `count`.
    error TaskCountInvalid(uint256 count);
    /// @notice A model has at most 4096 edges; this one has `count`.
    error EdgeCountInvalid(uint256 count);
    /// @notice The edge at position `index` does not lead from a task to a later task of the model.
    error EdgeInvalid(uint256 index, uint32 edge);
    /// @notice Edges must be strictly ascending; the edge at position `index` is not above the one before.
    error EdgesNotAscending(uint256 index);

    // ------------------------------------------------------------------------------- events

    /// @notice `developer` registered the model `modelId` under `name`. `dagRoot` is the hash of `tasks` and `edges`,
    /// as `Model` defines it; an edge is `from << 16 | to`.
    event ModelRegistered(
        bytes32 indexed modelId,
        address indexed developer,
        string name,
        bytes32 dagRoot,
        Task[] tasks,
        uint32[] edges
    );
    /// @notice The developer of the model `modelId` took it off the market.
    event ModelRetired(bytes32 indexed modelId);

    // ------------------------------------------------------------------- developer functions

    /// @notice Registers a model under a name, with the caller as its developer.
    /// @param modelId Digest of the model's manifest.
    /// @param name Name of 1 to 64 bytes: a new one, or one that belongs to the caller.
    /// @param tasks 1 to 1024 tasks in topological order.
    /// @param edges At most 4096 edges between positions in `tasks`, each `from << 16 | to` with from < to, strictly
    /// ascending. The graph therefore has neither cycles nor duplicate edges.
    function register(bytes32 modelId, string calldata name, Task[] calldata tasks, uint32[] calldata edges) external;

    /// @notice Takes a model off the market, for good: clients and committee members start no new executions of it.
    /// Earlier executions continue and are paid. Only the model's developer may call this.
    /// @param modelId Id of the model.
    function retire(bytes32 modelId) external;

    // ------------------------------------------------------------------------------- views

    /// @notice Returns a model. Reverts if it is unknown.
    /// @param modelId Id of the model.
    function modelOf(bytes32 modelId) external view returns (Model memory);

    /// @notice Returns what a price follows from. Reverts if the model is unknown.
    /// @param modelId Id of the model.
    /// @return pricePerStep Price of one step, in nano-USDC.
    /// @return taskCount Number of tasks.
    function termsOf(bytes32 modelId) external view returns (uint256 pricePerStep, uint256 taskCount);

    /// @notice Returns whether the model's developer has retired it; false if the model is unknown.
    /// @param modelId Id of the model.
    function isRetired(bytes32 modelId) external view returns (bool);

    /// @notice Returns the id of the model that a name points to, retired or not. Reverts if the name is unknown.
    /// @param name The name.
    function modelByName(string calldata name) external view returns (bytes32 modelId);
}
