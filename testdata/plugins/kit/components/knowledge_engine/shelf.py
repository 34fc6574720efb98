from langbot_plugin.api.definition.components.knowledge_engine.engine import KnowledgeEngine, KnowledgeEngineCapability
from langbot_plugin.api.entities.builtin.provider.message import ContentElement
from langbot_plugin.api.entities.builtin.rag.context import RetrievalContext, RetrievalResponse, RetrievalResultEntry
from langbot_plugin.api.entities.builtin.rag.enums import DocumentStatus
from langbot_plugin.api.entities.builtin.rag.models import IngestionContext, IngestionResult


class Shelf(KnowledgeEngine):
    @classmethod
    def get_capabilities(cls) -> list[str]:
        return [KnowledgeEngineCapability.DOC_INGESTION]

    async def on_knowledge_base_create(self, kb_id: str, config: dict) -> None:
        await self.plugin.set_plugin_storage("kb-" + kb_id, b"created")

    async def on_knowledge_base_delete(self, kb_id: str) -> None:
        await self.plugin.delete_plugin_storage("kb-" + kb_id)

    async def ingest(self, context: IngestionContext) -> IngestionResult:
        data = await self.plugin.get_knowledge_file_stream(context.file_object.storage_path)
        return IngestionResult(
            document_id=context.file_object.metadata.document_id,
            status=DocumentStatus.COMPLETED,
            chunks_created=len(data),
        )

    async def delete_document(self, kb_id: str, document_id: str) -> bool:
        return document_id != "missing"

    async def retrieve(self, context: RetrievalContext) -> RetrievalResponse:
        entry = RetrievalResultEntry(
            id="1",
            content=[ContentElement(type="text", text=context.query)],
            metadata={"knowledge_base_id": context.knowledge_base_id},
            distance=0.25,
        )
        return RetrievalResponse(results=[entry], total_found=1)
