// SPDX-License-Identifier: MIT
pragma solidity ^0.8.28;

import {SafeCast} from "@openzeppelin/contracts/utils/math/SafeCast.sol";
import {IModelRegistry, Model, Task} from "./interfaces/IModelRegistry.sol";

/// @title The model registry
/// @notice See {IModelRegistry}.
/// @dev The contract has no owner, so nobody but its developer can retire a model, and nobody can take a name away.
contract ModelRegistry is IModelRegistry {
    // ---------------------------------------------------------------------------- constants

    uint256 internal constant MAX_TASKS = 1024; // bounds the loops below
    uint256 internal constant MAX_EDGES = 4096; // four per task; a task in a graph of layers has one or two
    uint256 internal constant MAX_NAME_BYTES = 64;

    // ------------------------------------------------------------------------------ storage

    mapping(bytes32 modelId => Model) internal _models;
    mapping(string name => address owner) internal _nameOwner;
    mapping(string name => bytes32 modelId) internal _nameTarget;

    /// @inheritdoc IModelRegistry
    mapping(bytes32 modelId => bool) public isRetired;

    // ---------------------------------------------------------------- developer functions

    /// @inheritdoc IModelRegistry
    function register(bytes32 modelId, string calldata name, Task[] calldata tasks, uint32[] calldata edges)
        external
    {
        require(modelId != 0, IdMissing());
        require(_models[modelId].developer == address(0), ModelExists(modelId));
        uint256 length = bytes(name).length;
        require(length > 0 && length <= MAX_NAME_BYTES, NameLengthInvalid(length));
        address owner = _nameOwner[name];
        require(owner == address(0) || owner == msg.sender, NameTaken(name, owner));
        uint80 price = _checkTasks(tasks);
        _checkEdges(edges, tasks.length);

        bytes32 dagRoot = keccak256(abi.encode(tasks, edges));
        _models[modelId] = Model({
            developer: msg.sender,
            taskCount: SafeCast.toUint16(tasks.length),
            pricePerStep: price,
            dagRoot: dagRoot,
            name: name
        });
        if (owner == address(0)) _nameOwner[name] = msg.sender;
        _nameTarget[name] = modelId;
        emit ModelRegistered(modelId, msg.sender, name, dagRoot, tasks, edges);
    }

    /// @inheritdoc IModelRegistry
    /// @dev The market does not check this: a plan signed before must still reach the chain and be paid.
    function retire(bytes32 modelId) external {
        address developer = _models[modelId].developer;
        require(developer != address(0), UnknownModel(modelId));
        require(msg.sender == developer, NotDeveloper(modelId, developer));
        require(!isRetired[modelId], ModelRetiredAlready(modelId));
        isRetired[modelId] = true;
        emit ModelRetired(modelId);
    }

    // ------------------------------------------------------------------------------- views

    /// @inheritdoc IModelRegistry
    function modelOf(bytes32 modelId) external view returns (Model memory model) {
        model = _models[modelId];
        require(model.developer != address(0), UnknownModel(modelId));
    }

    /// @inheritdoc IModelRegistry
    function termsOf(bytes32 modelId) external view returns (uint256 pricePerStep, uint256 taskCount) {
        Model storage model = _models[modelId];
        require(model.developer != address(0), UnknownModel(modelId));
        return (model.pricePerStep, model.taskCount);
    }

    /// @inheritdoc IModelRegistry
    function modelByName(string calldata name) external view returns (bytes32 modelId) {
        modelId = _nameTarget[name];
        require(modelId != 0, UnknownName(name));
    }

    // ----------------------------------------------------------------------------- internal

    /// @return price Sum of the tasks' prices. 1024 prices of 64 bits need 74 bits.
    function _checkTasks(Task[] calldata tasks) internal pure returns (uint80 price) {
        uint256 count = tasks.length;
        require(count > 0 && count <= MAX_TASKS, TaskCountInvalid(count));
        for (uint256 i; i < count; ++i) {
            require(tasks[i].taskId != 0, IdMissing());
            price += tasks[i].priceNanoUsdc;
        }
    }

    /// @dev from < to makes the order of the tasks topological. Ascending edges are unique.
    function _checkEdges(uint32[] calldata edges, uint256 taskCount) internal pure {
        uint256 count = edges.length;
        require(count <= MAX_EDGES, EdgeCountInvalid(count));
        uint32 previous;
        for (uint256 i; i < count; ++i) {
            uint32 edge = edges[i];
            uint256 to = edge & 0xffff;
            require(edge >> 16 < to && to < taskCount, EdgeInvalid(i, edge));
            require(edge > previous, EdgesNotAscending(i)); // holds for the first: edge 0 is refused above
            previous = edge;
        }
    }
}
