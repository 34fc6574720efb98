package pluginwire

// known maps every action to its constant, so that a decoded name needs no memory of
// its own.
var known = func() map[string]string {
	m := map[string]string{}
	for _, name := range Actions() {
		m[name] = name
	}
	return m
}()

// Actions lists every action of the protocol's plugin side.
func Actions() []string {
	return []string{
		ActionPing, ActionHeartbeat, ActionFileChunk, ActionCancelAction, ActionStreamAck, ActionSetRuntimeConfig,
		ActionReconcilePluginInstallations, ActionApplyPluginInstallation, ActionRemovePluginInstallation,
		ActionGetDebugInfo, ActionGetStorageAnalysis, ActionListPlugins, ActionGetPluginInfo, ActionGetPluginIcon,
		ActionGetPluginReadme, ActionGetPluginLogs, ActionGetPluginAssetsFile, ActionInstallPlugin, ActionRestartPlugin,
		ActionDeletePlugin, ActionUpgradePlugin, ActionEmitEvent, ActionPluginDiagnostic, ActionListTools, ActionCallTool,
		ActionListCommands, ActionExecuteCommand, ActionListAgentRunners, ActionListRunners, ActionRunAgent,
		ActionRunRunner, ActionRetrieveKnowledge, ActionListKnowledgeEngines, ActionRAGIngestDocument,
		ActionRAGDeleteDocument, ActionRAGOnKBCreate, ActionRAGOnKBDelete, ActionGetRAGCreationSettings,
		ActionGetRAGRetrievalSettings, ActionListParsers, ActionParseDocument, ActionPageAPI, ActionInitializePlugin,
		ActionAttachPluginSlot, ActionDetachPluginSlot, ActionGetPluginSlotContainer, ActionGetPluginContainer,
		ActionIngestDocument, ActionDeleteDocument, ActionOnKBCreate, ActionOnKBDelete, ActionGetRAGCapabilities,
		ActionShutdown, ActionBuildPluginPackage, ActionGitSyncPlugin, ActionRegisterPlugin, ActionListPluginsManifest,
		ActionReplyMessage, ActionGetBotUUID, ActionSetQueryVar, ActionGetQueryVar, ActionGetQueryVars,
		ActionCreateNewConversation, ActionGetLangbotVersion, ActionGetBots, ActionGetBotInfo, ActionSendMessage,
		ActionCallPlatformAPI, ActionReplyStream, ActionGetLLMModels, ActionCountTokens, ActionInvokeLLM,
		ActionInvokeLLMStream, ActionInvokeEmbedding, ActionInvokeRerank, ActionVectorUpsert, ActionVectorSearch,
		ActionVectorDelete, ActionVectorList, ActionGetKnowledgeFileStream, ActionListKnowledgeBases,
		ActionListPipelineKnowledgeBases, ActionRetrieveKnowledgeBase, ActionInvokeParser, ActionGetConfigFile,
		ActionGetToolDetail, ActionSetPluginStorage, ActionGetPluginStorage, ActionGetPluginStorageKeys,
		ActionDeletePluginStorage, ActionSetWorkspaceStorage, ActionGetWorkspaceStorage, ActionGetWorkspaceStorageKeys,
		ActionDeleteWorkspaceStorage, ActionGetBoxStatus, ActionListBoxes, ActionAcquireBox, ActionBindBox,
		ActionImportBoxAttachments, ActionExportBoxFiles, ActionGetPrompt, ActionHistoryPage, ActionHistorySearch,
		ActionEventGet, ActionEventPage, ActionSteeringPull, ActionStateGet, ActionStateSet, ActionStateDelete,
		ActionStateList, ActionRunGet, ActionRunList, ActionRunEventsPage, ActionRunCancel, ActionRunAppendResult,
		ActionRunFinalize, ActionRunClaim, ActionRunRenewClaim, ActionRunReleaseClaim, ActionRunnerList,
		ActionRuntimeRegister, ActionRuntimeHeartbeat, ActionRuntimeList, ActionRuntimeReconcile, ActionRunStats,
		ActionRuntimeStats, ActionRunnerStats, ActionInitializePluginSettings, ActionGetPluginSettings,
		ActionSetBinaryStorage, ActionGetBinaryStorage, ActionGetBinaryStorageKeys, ActionDeleteBinaryStorage,
	}
}
